"""Decode graphs: the model's work for a decode step is captured once for each size, and later steps replay it.

A graph reads its inputs at the addresses of the capture. So each size has its own input tensors: a step's inputs are
copied there, the graph is replayed, and the result is copied out, because the next replay overwrites it.

    step's inputs ──copy──> inputs of size 8 ──graph──> result of size 8 ──copy──> the step's result
                            (tokens, positions, slots, lengths, block table)

Core pads the step to one of the platform's sizes. Block tables grow with the sequences; with a graph per table width,
dozens of graphs would be captured again whenever the longest sequence exceeds a width, each in the time of many steps.
So a graph's table has a width for sequences of any usual length from the start, and graphs share it. Kernels launch for
that length and read only as far as each sequence goes. Steps with prompt tokens, and functions that cannot be captured,
run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from mvllm.plugin_api import CompileBackend, PlatformError, get_logger
from mvllm_torch_gpu.paged_metadata import PagedMetadata
from mvllm_torch_gpu.shapes import LARGEST_CAPTURE

logger = get_logger("mvllm.torch_gpu.decode_graphs")

TABLE_TOKENS = 1 << 17
"""Tokens of a sequence that fit a graph's block table. Longer sequences have separate graphs."""


class GraphCapturer(Protocol):
    """Captures graphs. `DeviceGraphs` implements it."""

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """As in GraphBackend."""

    def forbid_synchronization(self) -> AbstractContextManager[None]:
        """Context for the run of a step before its capture; fails if the step waits for the device."""


class DecodeGraphBackend(CompileBackend):
    """Compile backend that captures and replays decode steps.

    Args:
        graphs: Creates the capturer; called when the first function is compiled.
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
        self._graphs = graphs
        self._version = version
        self._fuse = fuse
        self._out_of_memory = out_of_memory
        self._table_tokens = table_tokens

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """A callable that replays decode steps. Each size is captured when its first step runs."""
        if self._fuse is not None:
            function = self._fuse(function, dynamic)
        return _Function(function, self._graphs(), self._out_of_memory, GraphBlockTables(self._table_tokens))

    def cache_key(self) -> str:
        """Graphs exist within one process; the key names the version that captured them."""
        return f"graphs-1-{self._version}"


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


class _Function:
    """A function and its captured graphs, by the sizes of its arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        graphs: GraphCapturer,
        out_of_memory: Callable[[], str],
        tables: GraphBlockTables,
    ) -> None:
        self._function = function
        self._graphs = graphs
        self._out_of_memory = out_of_memory
        self._tables = tables
        self._captured: dict[Hashable, _Captured | None] = {}

    def __call__(self, *args: Any) -> Any:
        try:
            return self._call(args)
        except torch.OutOfMemoryError as e:
            raise MemoryError(self._out_of_memory()) from e

    def _call(self, args: tuple[Any, ...]) -> Any:
        key = _key_of(args, self._tables)
        if key is None:
            return self._function(*args)
        if key not in self._captured:
            self._captured[key] = self._capture(args)
        captured = self._captured[key]
        return self._function(*args) if captured is None else captured.run(args)

    def _capture(self, args: tuple[Any, ...]) -> _Captured | None:
        """Captures a graph for steps like this one; None if that fails."""
        try:
            return _Captured(self._function, self._graphs, self._tables, args)
        except (PlatformError, torch.OutOfMemoryError) as e:
            # The step's own arguments are unmodified, so it runs without a graph.
            logger.warning("Decode steps of %d requests run without a graph: %s", len(args[0]), e)
            return None


class _Captured:
    """A captured graph with its input and output tensors.

    Raises:
        PlatformError: The function cannot be captured.
    """

    def __init__(
        self, function: Callable[..., Any], graphs: GraphCapturer, tables: GraphBlockTables, args: tuple[Any, ...]
    ) -> None:
        self._inputs = tuple(_input_buffer(arg, place, tables) for place, arg in enumerate(args))
        self._load(args)
        with graphs.forbid_synchronization():
            trial = function(*self._inputs)
        if not isinstance(trial, torch.Tensor):
            raise PlatformError(f"The step returns a {type(trial).__name__}, not a tensor.")
        del trial
        self._load(args)  # the function may modify its arguments
        self._result: torch.Tensor | None = None

        def step() -> None:
            self._result = function(*self._inputs)

        self._replay = graphs.capture(step)

    def run(self, args: tuple[Any, ...]) -> torch.Tensor:
        """The function's result for arguments of the same sizes."""
        self._load(args)
        self._replay()
        assert self._result is not None
        return self._result.clone()

    def _load(self, args: tuple[Any, ...]) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for target, arg in zip(self._inputs, args, strict=True):
            if isinstance(arg, torch.Tensor):
                targets.append(target)
                sources.append(arg)
            elif isinstance(arg, PagedMetadata):
                for part, other in target.parts_to_fill(arg):
                    targets.append(part)
                    sources.append(other)
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


def _key_of(args: tuple[Any, ...], tables: GraphBlockTables) -> Hashable | None:
    """Key under which steps share a graph; None for steps without a graph."""
    plans = [arg for arg in args if isinstance(arg, PagedMetadata)]
    rows = len(args[0]) if args and isinstance(args[0], torch.Tensor) else 0
    if not plans or not 0 < rows <= LARGEST_CAPTURE or not all(plan.is_decode(rows) for plan in plans):
        return None
    key: list[Hashable] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            key.append((tuple(arg.shape), arg.dtype))
        elif isinstance(arg, PagedMetadata):
            key.append((arg.num_tokens, tables.width(arg.pages, arg.block_size), arg.block_size))
        elif arg is None:
            key.append(None)
        else:
            return None
    return tuple(key)


def _input_buffer(arg: Any, place: int, tables: GraphBlockTables) -> Any:
    """An input buffer like `arg`, the argument at index `place`."""
    if isinstance(arg, torch.Tensor):
        return torch.empty_like(arg, memory_format=torch.contiguous_format)
    if isinstance(arg, PagedMetadata):
        return arg.static_buffers(tables.buffer_for(place, arg))
    return arg
