"""Attention backend that measures the Triton kernels and the installed libraries, and uses the fastest one.

The choice is made once per kind of step (attention_measurement.py), before the first step of the kind: `build_metadata`
times each implementation that supports the kind on a step of realistic length over the layer's cache, and waits for it.
`forward` uses what the metadata says; so a step is captured with one implementation, and nothing is timed within it.
The warm-up runs one step of each captured size, so that later only kinds of prompts are measured.

    step ── build_metadata ── kind known? ── no ── time every implementation ──┐
                                │ yes                                          │
                                └── metadata with the library and its plan  <──┘ ── forward (layer by layer)
"""

from __future__ import annotations

import subprocess
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout, KVLayout, get_logger
from mvllm_torch_gpu.attention import DTYPES, Cache, TritonAttention
from mvllm_torch_gpu.attention_library import UNSUPPORTED, AttentionLibrary
from mvllm_torch_gpu.attention_measurement import Clock, StepKind, device_seconds, realistic_step
from mvllm_torch_gpu.paged_metadata import PagedMetadata
from mvllm_torch_gpu.shapes import LARGEST_CAPTURE
from mvllm_torch_gpu.step_graphs import TABLE_TOKENS

logger = get_logger("mvllm.torch_gpu.autotuned_attention")

TRITON = "triton"

_MARGIN = 0.97
"""Largest share of the kernels' time with which a library replaces them: its plan takes time of the host, too."""

_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    OSError,
    ImportError,
    subprocess.SubprocessError,
)
"""What a library raises if its signature promises more than it supports, or a compiler or a target is missing."""


@dataclass(frozen=True)
class AutotunedMetadata(PagedMetadata):
    """A step's tables, and the library that computes it.

    Attributes:
        library: None for the Triton kernels.
        plan: The library's plan for this step.
    """

    library: AttentionLibrary | None = field(default=None, compare=False)
    plan: Any = field(default=None, compare=False)

    def static_buffers(self, table: torch.Tensor) -> Self:
        """As in PagedMetadata. A graph that also replays steps that the library does not support uses the kernels."""
        made = super().static_buffers(table)
        if self.library is None or self.library.takes(made):
            return made
        return replace(made, library=None, plan=None)


class AutotunedAttention(TritonAttention):
    """Attention backend that selects an implementation per kind of step; see the module.

    Args:
        spec: The layer; every library supports it.
        libraries: Candidates in addition to the Triton kernels.
        forced: The user has selected the only library: it computes every step that it supports.
        float8: See TritonAttention.
        clock: Times a call.
        table_tokens: Tokens that a row of a captured step's block table holds.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        libraries: Sequence[AttentionLibrary],
        *,
        forced: bool = False,
        float8: str = "float8_e4m3fn",
        clock: Clock | None = None,
        table_tokens: int = TABLE_TOKENS,
    ) -> None:
        super().__init__(spec, float8=float8)
        self._libraries = {library.name: library for library in libraries}
        self._forced = forced
        self._given_clock = clock
        self._table_tokens = table_tokens
        self._chosen: dict[StepKind, str] = {}
        self._failed: set[str] = set()
        # Weak references, because the engine frees the caches when it sleeps.
        self._cache_parts: tuple[weakref.ref[torch.Tensor], ...] = ()

    def kv_layout(self) -> KVLayout:
        layout = super().kv_layout()
        libraries = self._libraries.values()
        # A library that is installed or selected cannot be used with a block size that it does not accept.
        ordered = sorted(
            layout.block_sizes, key=lambda size: sum(not library.accepts_block_size(size) for library in libraries)
        )
        return replace(layout, block_sizes=tuple(ordered))

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Cache:
        for library in self._libraries.values():
            library.prepare(device)
        cache = super().allocate(num_blocks, block_size, device)
        self._cache_parts = tuple(weakref.ref(part) for part in cache)
        return cache

    def build_metadata(self, batch: BatchLayout) -> AutotunedMetadata:
        step = AutotunedMetadata(**vars(super().build_metadata(batch)))
        library = self._library_for(step)
        if library is None:
            return step
        plan = library.plan(batch, step.slot_mapping.device)
        return step if plan is UNSUPPORTED else replace(step, library=library, plan=plan)

    def forward(
        self, query: torch.Tensor, kv: Cache, metadata: PagedMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(metadata, AutotunedMetadata)
        if metadata.library is None:
            return super().forward(query, kv, metadata, sinks)
        return _by_library(metadata.library, query, kv, metadata)

    def _library_for(self, step: AutotunedMetadata) -> AttentionLibrary | None:
        """The library that computes a step; None for the Triton kernels."""
        if step.visible_lens is not None:
            return None  # of the libraries none has such masks
        candidates = {name: library for name, library in self._libraries.items() if library.takes(step)}
        if not candidates:
            return None
        if self._forced:
            return next(iter(candidates.values()))
        kind = StepKind.of(step)
        if kind not in self._chosen:
            self._measure(kind)
        return candidates.get(self._chosen.get(kind, TRITON))

    def _measure(self, kind: StepKind) -> None:
        """Times the implementations on a step of a kind and stores the fastest one; nothing if there is no cache."""
        cache = tuple(part() for part in self._cache_parts)
        kv = tuple(part for part in cache if part is not None)
        if not kv or len(kv) < len(cache) or kv[0].shape[1] != kind.block_size or len(kv[0]) < 2:
            return  # the profile run has a cache of one block
        device = kv[0].device
        try:
            batch = realistic_step(kind, len(kv[0]), self._table_tokens, device)
            shape = (batch.num_tokens, self.spec.num_heads, self.spec.head_size)
            query = torch.zeros(shape, dtype=DTYPES[self.spec.dtype], device=device)
            step = AutotunedMetadata(**vars(super().build_metadata(batch)))
            replayed = kind.is_decode and kind.num_requests <= LARGEST_CAPTURE
            clock = self._given_clock or partial(device_seconds, device, replayed=replayed)
            triton = clock(partial(super().forward, query, kv, step))
        except torch.OutOfMemoryError:
            logger.warning("Attention of steps of %s is not measured: the device has no memory for it.", kind)
            triton = None
        self._chosen[kind] = TRITON
        if triton is None:
            return
        seconds = {TRITON: triton}
        for name, library in self._libraries.items():
            if name not in self._failed and library.takes(step):
                seconds[name] = self._seconds_of(library, clock, query, kv, step, batch)
        fastest = min(seconds, key=lambda name: seconds[name])
        if seconds[fastest] <= triton * _MARGIN:
            self._chosen[kind] = fastest
        logger.info("Attention of steps of %s: %s, of %s.", kind, self._chosen[kind], _described(seconds))

    def _seconds_of(
        self,
        library: AttentionLibrary,
        clock: Clock,
        query: torch.Tensor,
        kv: Cache,
        step: AutotunedMetadata,
        batch: BatchLayout,
    ) -> float:
        """Time of a library's step; infinite if it fails, and other kinds then leave it out, too."""
        try:
            plan = library.plan(batch, query.device)
            if plan is UNSUPPORTED:
                return float("inf")
            planned = replace(step, library=library, plan=plan)
            found = clock(partial(_by_library, library, query, kv, planned))
        except _FAILURES as e:
            text = str(e).partition("\n")[0]
            logger.warning("%s failed and is not used: %s: %s", library.name, type(e).__name__, text)
            self._failed.add(library.name)
            return float("inf")
        return float("inf") if found is None else found


def _by_library(library: AttentionLibrary, query: torch.Tensor, kv: Cache, metadata: AutotunedMetadata) -> torch.Tensor:
    query = query if query.stride(-1) == 1 else query.contiguous()
    return library.run(query, kv[0], kv[1], metadata, metadata.plan).flatten(1)


def _described(seconds: dict[str, float]) -> str:
    """Times for a message: `triton 12.3 us, flashinfer failed`."""
    return ", ".join(
        f"{name} failed" if value == float("inf") else f"{name} {value * 1e6:.1f} us" for name, value in seconds.items()
    )
