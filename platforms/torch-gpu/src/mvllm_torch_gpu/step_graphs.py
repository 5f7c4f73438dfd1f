"""Step graphs: the work of a step is captured once for each shape, and later steps of the shape replay it.

A graph reads its inputs at the addresses of the capture. So each shape has its own input tensors: a step's inputs are
copied there, and the graph is replayed. The results of the model are in one tensor that all of its graphs share: they
are read before the next replay.

    step's inputs ──copy──> inputs of a shape ──graph──> shared result ──graph of the head──> tokens for the host
                            (tokens, positions, slots, lengths, block table)

Which steps are captured, core decides from the platform's `ShapePolicy.capture` (shapes.py): it pads them to one of
these shapes and marks them. Block tables grow with the sequences; with a graph per table width, dozens of graphs would
be captured again whenever the longest sequence exceeds a width, each in the time of many steps. So a graph's table has
a width for sequences of any usual length from the start, and graphs share it. Kernels launch for that length and read
only as far as each sequence goes. Other steps, and functions that cannot be captured, run eagerly.

A step stores sequence states once: another run would start from what the first has stored. So the run before a capture
and the capture itself get write slots -1, which are scratch memory.

A capture that fails is tried again, after more and more steps: memory may be free then. Such a step has run eagerly
before, and is captured without another run, so that ranks make the same calls whether they capture or replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from mvllm.plugin_api import CompileBackend, PlatformError, StateArguments, get_logger
from mvllm_torch_gpu.out_of_memory import is_out_of_memory
from mvllm_torch_gpu.paged_metadata import PagedMetadata
from mvllm_torch_gpu.shapes import LARGEST_CAPTURE

logger = get_logger("mvllm.torch_gpu.step_graphs")

TABLE_TOKENS = 1 << 17
"""Tokens of a sequence that fit a graph's block table. Longer sequences have separate graphs."""

FIRST_RETRY = 16
"""Steps of a shape that run eagerly after its first failed capture."""

RETRY_FACTOR = 8
"""After each further failure so many times more."""

_OF_STATES = ("query_start_loc", "read_slots", "write_slots")
"""The tensors of StateArguments."""


class GraphCapturer(Protocol):
    """Captures graphs. `DeviceGraphs` implements it."""

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """See DeviceGraphs."""

    def forbid_synchronization(self) -> AbstractContextManager[None]:
        """Context for the run of a step before its capture; fails if the step waits for the device."""


class StepGraphBackend(CompileBackend):
    """Compile backend that captures and replays steps.

    Args:
        graphs: Creates the capturer of all functions; called when the first one is compiled.
        version: Part of `cache_key`.
        fuse: Compiles the function before it is captured, for example by `torch.compile`; None for no compilation.
        out_of_memory: Text for the error of a step that runs out of memory; core adds the hint.
        table_tokens: See TABLE_TOKENS.
    """

    def __init__(
        self,
        graphs: Callable[[], GraphCapturer],
        version: str,
        *,
        fuse: Callable[[Callable[..., Any], bool], Callable[..., Any]] | None = None,
        out_of_memory: Callable[[], str] = lambda: "the device has no memory left",
        table_tokens: int = TABLE_TOKENS,
    ) -> None:
        self._new_graphs = graphs
        self._version = version
        self._fuse = fuse
        self._out_of_memory = out_of_memory
        self._tables = GraphBlockTables(table_tokens)
        self._results = ResultBuffers()

    @cached_property
    def _graphs(self) -> GraphCapturer:
        return self._new_graphs()

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """A callable that replays marked steps. Each shape is captured when its first step runs."""
        if self._fuse is not None:
            function = self._fuse(function, dynamic)
        return _Function(self, function, is_head=False)

    def compile_head(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A callable that replays the head. Each shape is captured when its first step runs."""
        return _Function(self, function, is_head=True)

    def cache_key(self) -> str:
        """Graphs exist within one process; the key names the version that captured them."""
        return f"graphs-1-{self._version}"

    def key_of(self, args: tuple[Any, ...], *, is_head: bool) -> Hashable | None:
        """Key under which steps share a graph; None for steps without a graph."""
        metadata = [arg for arg in args if isinstance(arg, PagedMetadata | StateArguments)]
        rows = len(args[0]) if args and isinstance(args[0], torch.Tensor) else 0
        if not 0 < rows <= LARGEST_CAPTURE or not (metadata or is_head) or not all(each.capture for each in metadata):
            return None
        key: list[Hashable] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                key.append((tuple(arg.shape), arg.dtype, arg.data_ptr() if self._results.owns(arg) else None))
            elif isinstance(arg, PagedMetadata):
                width = self._tables.width(arg.pages, arg.block_size)
                key.append((arg.kind, arg.num_tokens, len(arg.seq_lens), width, arg.block_size))
            elif isinstance(arg, StateArguments):
                key.append((arg.max_query_len, len(arg.read_slots)))
            elif arg is None:
                key.append(None)
            else:
                return None
        return tuple(key)

    def input_buffer(self, arg: Any, place: int) -> Any:
        """An input buffer like `arg`, the argument at index `place`."""
        if isinstance(arg, torch.Tensor):
            return arg if self._results.owns(arg) else torch.empty_like(arg, memory_format=torch.contiguous_format)
        if isinstance(arg, PagedMetadata):
            return arg.static_buffers(self._tables.buffer_for(place, arg))
        if isinstance(arg, StateArguments):
            starts, read, write = (torch.empty_like(getattr(arg, name)) for name in _OF_STATES)
            return replace(arg, query_start_loc=starts, read_slots=read, write_slots=write)
        return arg

    def result_buffer(self, result: torch.Tensor) -> torch.Tensor:
        """See ResultBuffers."""
        return self._results.buffer_for(result)

    def capture(self, step: Callable[[], None]) -> Callable[[], Any]:
        """See GraphCapturer."""
        return self._graphs.capture(step)

    def forbid_synchronization(self) -> AbstractContextManager[None]:
        """See GraphCapturer."""
        return self._graphs.forbid_synchronization()

    def describe_memory(self) -> str:
        """Text for the error of a step that runs out of memory."""
        return self._out_of_memory()


class GraphBlockTables:
    """Block tables that graphs read: graphs share one per width, because one graph runs at a time.

    Args:
        tokens: Length of the longest sequence that fits the narrowest table.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def width(self, pages: int, block_size: int) -> int:
        """Width of the graph table for a step with `pages` blocks: `tokens` of blocks, or 8, 64, ... times as many."""
        width = max(1, self._tokens // block_size)
        while width < pages:
            width *= 8
        return width

    def buffer_for(self, place: int, step: PagedMetadata) -> torch.Tensor:
        """The table of a graph for steps like this one.

        Args:
            place: Index of the metadata among a step's arguments; each index has its own table.

        Returns:
            int32 [requests, width], the first rows of the table that graphs for more requests use.
        """
        rows, width = len(step.seq_lens), self.width(step.pages, step.block_size)
        table = self._made.get((place, width))
        if table is None or len(table) < rows:
            table = torch.zeros((rows, width), dtype=torch.int32, device=step.block_table.device)
            self._made[place, width] = table  # earlier graphs keep the previous one
        return table[:rows]


class ResultBuffers:
    """Tensors for the results of graphs: graphs share one per row shape, because one graph runs at a time."""

    def __init__(self) -> None:
        self._made: dict[Hashable, torch.Tensor] = {}

    def buffer_for(self, result: torch.Tensor) -> torch.Tensor:
        """The first rows of the buffer for results like this one, [at most LARGEST_CAPTURE rows, ...]."""
        key = result.shape[1:], result.dtype
        if key not in self._made:
            self._made[key] = result.new_empty((LARGEST_CAPTURE, *result.shape[1:]))
        return self._made[key][: len(result)]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the first rows of one of the buffers."""
        return tensor.dim() > 0 and any(
            tensor.data_ptr() == made.data_ptr() and tensor.stride() == made.stride() for made in self._made.values()
        )


@dataclass
class _Failure:
    """Failed captures of one shape.

    Attributes:
        count: How many there were.
        steps_left: Steps that run eagerly before the next capture.
        result: A result of such a step without its memory; None before the first one.
    """

    count: int = 0
    steps_left: int = 0
    result: torch.Tensor | None = None

    def add(self) -> None:
        """Counts another failure."""
        self.steps_left = FIRST_RETRY * RETRY_FACTOR**self.count
        self.count += 1


class _Function:
    """A function and its captured graphs, by the shapes of its arguments.

    Args:
        backend: The backend, with what its functions share.
        function: The function.
        is_head: The function follows the model: it has no attention metadata, and its results are small.
    """

    def __init__(self, backend: StepGraphBackend, function: Callable[..., Any], *, is_head: bool) -> None:
        self._backend = backend
        self._function = function
        self._is_head = is_head
        self._captured: dict[Hashable, _Captured] = {}
        self._failures: dict[Hashable, _Failure] = {}

    def __call__(self, *args: Any) -> Any:
        try:
            return self._call(args)
        except Exception as e:
            if isinstance(e, MemoryError) or not is_out_of_memory(e):
                raise
            raise MemoryError(self._backend.describe_memory()) from e

    def _call(self, args: tuple[Any, ...]) -> Any:
        key = self._backend.key_of(args, is_head=self._is_head)
        if key is None:
            return self._function(*args)
        captured = self._captured.get(key)
        if captured is not None:
            return captured.run(args)
        failure = self._failures.get(key)
        if failure is None or not failure.steps_left:
            captured = self._capture(key, args, None if failure is None else failure.result)
            if captured is not None:
                self._captured[key] = captured
                return captured.run(args)
            failure = self._failures[key]
        failure.steps_left -= 1
        result = self._function(*args)
        if isinstance(result, torch.Tensor):
            failure.result = torch.empty_like(result, device="meta")
        return result

    def _capture(self, key: Hashable, args: tuple[Any, ...], earlier: torch.Tensor | None) -> _Captured | None:
        """Captures a graph for steps like this one; None if that fails."""
        try:
            return _Captured(self._function, self._backend, args, earlier, is_head=self._is_head)
        except _TrialWithoutMemory as e:
            assert e.__cause__ is not None
            raise e.__cause__ from None  # as the step itself would fail
        except Exception as e:
            if not isinstance(e, PlatformError) and not is_out_of_memory(e):
                raise
            failure = self._failures.setdefault(key, _Failure())
            failure.add()
            # The step's own arguments are unmodified, so it runs without a graph.
            log = logger.warning if failure.count == 1 else logger.debug
            kinds = [arg.kind.value.capitalize() for arg in args if isinstance(arg, PagedMetadata)]
            log(
                "%s steps of %d tokens run without a graph, at least the next %d: %s",
                kinds[0] if kinds else "The heads of",
                len(args[0]),
                failure.steps_left,
                str(e).partition("\n")[0],
            )
            return None


class _TrialWithoutMemory(Exception):
    """The run of a step before its capture has no memory."""


class _Captured:
    """A captured graph with its input and output tensors.

    Args:
        function: The function.
        backend: The backend.
        args: Arguments of a step.
        earlier: A result of an earlier step of this shape; None if the function has not run with this shape.
        is_head: See _Function.

    Raises:
        PlatformError: The function cannot be captured.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: StepGraphBackend,
        args: tuple[Any, ...],
        earlier: torch.Tensor | None,
        *,
        is_head: bool,
    ) -> None:
        self._inputs = tuple(backend.input_buffer(arg, place) for place, arg in enumerate(args))
        self._load(args)
        self._store_no_states()
        if earlier is None:
            try:
                with backend.forbid_synchronization():
                    earlier = function(*self._inputs)
            except Exception as e:
                if is_out_of_memory(e):
                    raise _TrialWithoutMemory from e
                raise
            if not isinstance(earlier, torch.Tensor):
                raise PlatformError(f"The step returns a {type(earlier).__name__}, not a tensor.")
            self._load(args)  # the function may modify its arguments
            self._store_no_states()
        device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
        like = earlier if earlier.device == device else torch.empty_like(earlier, device=device)
        self._result = torch.empty_like(like) if is_head else backend.result_buffer(like)
        del earlier, like

        def step() -> None:
            self._result.copy_(function(*self._inputs))

        self._replay = backend.capture(step)

    def run(self, args: tuple[Any, ...]) -> torch.Tensor:
        """The function's result for arguments of the same shapes, valid until the next run of any graph."""
        self._load(args)
        self._replay()
        return self._result

    def _store_no_states(self) -> None:
        for target in self._inputs:
            if isinstance(target, StateArguments):
                target.write_slots.fill_(-1)

    def _load(self, args: tuple[Any, ...]) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for target, arg in zip(self._inputs, args, strict=True):
            if isinstance(arg, torch.Tensor):
                if target.data_ptr() != arg.data_ptr():  # else the result of the model, which is read in place
                    targets.append(target)
                    sources.append(arg)
            elif isinstance(arg, PagedMetadata):
                for part, other in target.parts_to_fill(arg):
                    targets.append(part)
                    sources.append(other)
            elif isinstance(arg, StateArguments):
                targets += [getattr(target, name) for name in _OF_STATES]
                sources += [getattr(arg, name) for name in _OF_STATES]
        _copy(targets, sources)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies tensors, those of one dtype in one launch.

    Tensors with other strides are copied separately, because torch launches one kernel per tensor for a group with one.
    """
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.stride() != source.stride():
            target.copy_(source)
            continue
        dtype_targets, dtype_sources = by_dtype.setdefault(target.dtype, ([], []))
        dtype_targets.append(target)
        dtype_sources.append(source)
    for dtype_targets, dtype_sources in by_dtype.values():
        torch._foreach_copy_(dtype_targets, dtype_sources)
