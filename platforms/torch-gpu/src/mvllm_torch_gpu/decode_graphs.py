"""Decode graphs: the model's work for a decode step is captured once for each size, and later steps replay it.

A graph reads its inputs where they were when it was captured. So each size has tensors of its own; a step's inputs are
copied there, the graph is replayed, and the result is copied out, since the next replay writes over it.

    step's inputs ──copy──> inputs of size 8 ──graph──> result of size 8 ──copy──> the step's result
                            (tokens, positions, slots, lengths, block table)

Core has padded the step to one of the platform's sizes. Block tables grow with the sequences, and a graph captured for
each width would mean that dozens are captured anew, each in the time of many steps, whenever the longest sequence
grows beyond one. So a graph's table has room for sequences of any usual length from the start, and graphs share it.
Kernels launch for sequences as long as that; they read only as far as each sequence goes. Steps with prompt tokens run
as they are; so does everything that cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from mvllm.plugin_api import CompileBackend, PlatformError, get_logger
from mvllm_torch_gpu.paged_metadata import PagedMetadata
from mvllm_torch_gpu.shapes import LARGEST_CAPTURE

logger = get_logger("mvllm.torch_gpu.captured_steps")

TABLE_TOKENS = 1 << 17
"""Tokens of a sequence that a graph's block table has room for. Longer ones have graphs of their own."""


class GraphCapturer(Protocol):
    """What captures. `DeviceGraphs` is one."""

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """As in GraphBackend."""

    def forbid_synchronization(self) -> AbstractContextManager[None]:
        """A context in which a step is run before it is captured; fails if it waits for the device."""


class DecodeGraphBackend(CompileBackend):
    """Graphs of decode steps.

    Args:
        graphs: Makes them; called when the first function is compiled.
        version: Goes into `cache_key`.
        fuse: Turns the function into a faster one beforehand, `torch.compile` say; None leaves it.
        out_of_memory: Words the error of a step that found no memory; core adds what to do.
        table_tokens: As TABLE_TOKENS.
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
        """A callable that replays decode steps. Each size is captured when the first step of it comes."""
        if self._fuse is not None:
            function = self._fuse(function, dynamic)
        return _Function(function, self._graphs(), self._out_of_memory, GraphBlockTables(self._table_tokens))

    def cache_key(self) -> str:
        """Graphs live as long as their process; the version says what made them."""
        return f"graphs-1-{self._version}"


class GraphBlockTables:
    """The block tables that graphs read: one of each width for all of them, since one graph runs at a time.

    Args:
        tokens: Of the longest sequence that the narrowest has room for.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def width(self, pages: int, block_size: int) -> int:
        """Blocks that a table has room for where a step's has `pages`: TABLE_TOKENS' worth, or 8, 64, ... times it."""
        width = max(1, self._tokens // block_size)
        while width < pages:
            width *= 8
        return width

    def buffer_for(self, place: int, step: PagedMetadata) -> torch.Tensor:
        """The table of a graph for steps like this one.

        Args:
            place: Of the metadata among a step's arguments: each has a table of its own.

        Returns:
            int32 [requests, width], the first rows of what graphs for more requests have.
        """
        rows, width = len(step.seq_lens), self.width(step.pages, step.block_size)
        table = self._made.get((place, width))
        if table is None or len(table) < rows:
            table = torch.zeros((rows, width), dtype=torch.int32, device=step.block_table.device)
            self._made[place, width] = table  # graphs that were captured before keep the other one
        return table[:rows]


class _Function:
    """One function and its graphs, by the sizes of its arguments."""

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
        """A graph for steps like this one; None where there can be none."""
        try:
            return _Captured(self._function, self._graphs, self._tables, args)
        except (PlatformError, torch.OutOfMemoryError) as e:
            # The step itself is not lost: its own arguments have not been touched, and it is run without a graph.
            logger.warning("Decode steps of %d requests run without a graph: %s", len(args[0]), e)
            return None


class _Captured:
    """A graph, and the tensors that it reads and writes.

    Raises:
        PlatformError: The function cannot be captured.
    """

    def __init__(
        self, function: Callable[..., Any], graphs: GraphCapturer, tables: GraphBlockTables, args: tuple[Any, ...]
    ) -> None:
        self._inputs = tuple(_room_for(arg, place, tables) for place, arg in enumerate(args))
        self._load(args)
        with graphs.forbid_synchronization():
            rehearsed = function(*self._inputs)
        if not isinstance(rehearsed, torch.Tensor):
            raise PlatformError(f"The step gives a {type(rehearsed).__name__}, not a tensor.")
        del rehearsed
        self._load(args)  # the function may write to its arguments
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
        room: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        for own, arg in zip(self._inputs, args, strict=True):
            if isinstance(arg, torch.Tensor):
                room.append(own)
                given.append(arg)
            elif isinstance(arg, PagedMetadata):
                for part, other in own.parts_to_fill(arg):
                    room.append(part)
                    given.append(other)
        _copy(room, given)


def _copy(room: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Copies tensors, those of one dtype together: small copies cost their launch.

    Those whose elements lie otherwise are copied alone: one of them among the others would have torch launch for each.
    """
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for own, other in zip(room, given, strict=True):
        if own.stride() != other.stride():
            own.copy_(other)
            continue
        targets, sources = by_dtype.setdefault(own.dtype, ([], []))
        targets.append(own)
        sources.append(other)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)


def _key_of(args: tuple[Any, ...], tables: GraphBlockTables) -> Hashable | None:
    """What has to be equal for steps to share a graph; None for steps that have none."""
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


def _room_for(arg: Any, place: int, tables: GraphBlockTables) -> Any:
    """A place for what is like `arg`, at a place among the arguments."""
    if isinstance(arg, torch.Tensor):
        return torch.empty_like(arg, memory_format=torch.contiguous_format)
    if isinstance(arg, PagedMetadata):
        return arg.static_buffers(tables.buffer_for(place, arg))
    return arg
