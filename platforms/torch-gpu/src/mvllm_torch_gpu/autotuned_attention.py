"""Attention backend that measures the Triton kernels and an installed library, and uses the faster one.

The kind of a step is: decode or not, and the sizes of the step and of its longest sequence, rounded to a power of two.
The first step of a kind is computed and timed with every implementation that supports it; later steps of the kind use
the fastest one. Kinds that the warm-up has run cost nothing later; each other kind waits for the device once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout, KVLayout, get_logger
from mvllm_torch_gpu.attention import Cache, TritonAttention
from mvllm_torch_gpu.attention_libraries import AttentionLibrary
from mvllm_torch_gpu.paged_metadata import PagedMetadata

logger = get_logger("mvllm.torch_gpu.autotuned_attention")

TRITON = "triton"
_ROUNDS = 5

Clock = Callable[[Callable[[], Any]], float | None]
"""Seconds that a call takes on the device; None if it cannot be timed now."""


@dataclass(frozen=True)
class AutotunedMetadata(PagedMetadata):
    """A step's tables, and the plans of the libraries that may compute it.

    Attributes:
        plans: The plans by the name of the library.
    """

    plans: dict[str, Any] = field(default_factory=dict, compare=False)


class AutotunedAttention(TritonAttention):
    """Attention backend that selects an implementation per kind of step; see the module.

    Args:
        spec: The layer; every library supports it.
        libraries: Candidates in addition to the Triton kernels.
        forced: The user has selected the only library: it computes every step that it supports.
        float8: See TritonAttention.
        clock: Times a call.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        libraries: Sequence[AttentionLibrary],
        *,
        forced: bool = False,
        float8: str = "float8_e4m3fn",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(spec, float8=float8)
        self._libraries = {library.name: library for library in libraries}
        self._forced = forced
        self._given_clock = clock
        self._chosen: dict[Hashable, str] = {}

    def kv_layout(self) -> KVLayout:
        layout = super().kv_layout()
        libraries = self._libraries.values()
        # A library that is installed or selected cannot be used with a block size that it does not accept.
        ordered = sorted(
            layout.block_sizes, key=lambda size: sum(not library.accepts_block_size(size) for library in libraries)
        )
        return replace(layout, block_sizes=tuple(ordered))

    def build_metadata(self, batch: BatchLayout) -> AutotunedMetadata:
        step = super().build_metadata(batch)
        chosen = self._chosen.get(_kind_of(step, step.num_tokens))
        device = step.slot_mapping.device
        plans = {
            name: library.plan(batch, device)
            for name, library in self._libraries.items()
            if chosen in (None, name) and library.takes(step)
        }
        return AutotunedMetadata(**{**vars(step), "plans": plans})

    def forward(
        self, query: torch.Tensor, kv: Cache, metadata: PagedMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(metadata, AutotunedMetadata)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            name: partial(self._by_library, library, query, kv, metadata)
            for name, library in self._libraries.items()
            if name in metadata.plans and library.takes(metadata)
        }
        kind = _kind_of(metadata, len(query))
        name = self._chosen.get(kind)
        if ways and name is None:
            name = next(iter(ways)) if self._forced else self._fastest(query, kv, metadata, ways, kind)
        if name is not None and name in ways:
            return ways[name]()
        return super().forward(query, kv, metadata, sinks)

    def _by_library(
        self, library: AttentionLibrary, query: torch.Tensor, kv: Cache, metadata: AutotunedMetadata
    ) -> torch.Tensor:
        query = query if query.stride(-1) == 1 else query.contiguous()
        return library.attend(query, kv[0], kv[1], metadata, metadata.plans[library.name]).flatten(1)

    def _fastest(
        self,
        query: torch.Tensor,
        kv: Cache,
        metadata: AutotunedMetadata,
        ways: dict[str, Callable[[], torch.Tensor]],
        kind: Hashable,
    ) -> str:
        """Name of the fastest implementation, stored for this kind; the Triton kernels if nothing can be timed."""
        clock = self._given_clock or partial(device_seconds, query.device)
        triton = clock(partial(super().forward, query, kv, metadata))
        if triton is None:
            return TRITON
        seconds = {TRITON: triton}
        for name, way in ways.items():
            try:
                found = clock(way)
            except (RuntimeError, ValueError, TypeError) as e:  # it does not support everything in its signature
                logger.warning("%s failed and is not used: %s", name, e)
                self._libraries.pop(name, None)
            else:
                seconds[name] = float("inf") if found is None else found
        best = min(seconds, key=lambda name: seconds[name])
        logger.info("Attention of steps %s: %s, of %s.", kind, best, seconds)
        self._chosen[kind] = best
        return best


def device_seconds(device: torch.device, call: Callable[[], Any]) -> float | None:
    """The best of a few runs of a call, after a warm-up run; None while a graph is captured."""
    if device.type == "cpu":
        return _best(call, lambda: None)
    module = torch.get_device_module(device)
    capturing = getattr(module, "is_current_stream_capturing", None)
    return None if capturing is not None and capturing() else _best(call, module.synchronize)


def _best(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    call()
    best = float("inf")
    for _ in range(_ROUNDS):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


def _kind_of(step: PagedMetadata, num_tokens: int) -> Hashable:
    return step.is_decode(num_tokens), num_tokens.bit_length(), step.max_seq_len.bit_length(), step.block_size
