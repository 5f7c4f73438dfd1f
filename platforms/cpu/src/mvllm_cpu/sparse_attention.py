"""Sparse attention with the compiled kernels: the selection of an indexer, and attention over selected positions.

The keys of an indexer, which are all read, are stored like those of other layers. Attention reads the selected tokens
only, so in its cache the dimensions of a token are adjacent (`csrc/kernels.h`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mvllm.plugin_api import AttentionSpec, KVLayout
from mvllm_cpu import cache_views, workspace
from mvllm_cpu.memory import zeros
from mvllm_cpu.paged_attention import (
    BLOCK_SIZES,
    FRONT_TOKENS,
    SCALE_BYTES,
    PagedAttention,
    PagedCache,
    PagedMetadata,
)
from mvllm_cpu.recording import Kernel

ALIGNMENT = 32
"""`SELECTED_ALIGNMENT` of csrc/kernels.h: elements of a stored token are rounded up to a multiple."""


class IndexerAttention(PagedAttention):
    """The keys of an indexer."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        pointer, length = ctypes.c_void_p, ctypes.c_int64
        selects = (pointer, pointer, length, pointer, length, pointer, pointer)
        self._select = Kernel(self._library, "mvllm_cpu_select_positions", selects)

    def select(
        self, query: torch.Tensor, weights: torch.Tensor, kv: PagedCache, metadata: PagedMetadata
    ) -> torch.Tensor:
        """Positions in ascending order."""
        query, weights = self._rows(query), weights.contiguous()
        positions = workspace.empty((query.shape[0], self.spec.index_topk or 0), torch.int32)
        self._select(
            metadata.handle,
            query.data_ptr(),
            query.stride(0),
            weights.data_ptr(),
            weights.stride(0),
            kv.address,
            positions.data_ptr(),
        )
        return positions


class SelectedAttention(PagedAttention):
    """Attention over positions that an indexer has selected. Core calls `forward_selected` instead of `forward`."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        pointer, length = ctypes.c_void_p, ctypes.c_int64
        attends = (pointer, pointer, length, pointer, pointer, pointer)
        self._attention_selected = Kernel(self._library, "mvllm_cpu_sparse_attention", attends)
        self._token_size = -(-spec.head_size // ALIGNMENT) * ALIGNMENT

    def kv_layout(self) -> KVLayout:
        per_token = self._token_size * self._kv_dtype.itemsize + self._scaled * SCALE_BYTES
        return KVLayout(block_sizes=BLOCK_SIZES, bytes_per_token=per_token)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> PagedCache:
        assert block_size in BLOCK_SIZES, f"block size {block_size} is not among those of kv_layout(): {BLOCK_SIZES}"
        front = FRONT_TOKENS * self._token_size * self._kv_dtype.itemsize
        keys = zeros((num_blocks, block_size, self._token_size), self._kv_dtype, small_front=front)
        scales = [zeros((num_blocks, block_size), torch.float32)] if self._scaled else []
        cache = PagedCache.of([keys], scales)
        cache.prefault_in_background(self._library, block_size)
        return cache

    def forward(
        self, query: torch.Tensor, kv: PagedCache, metadata: PagedMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise AssertionError("core calls forward_selected for layers with index_topk")

    def forward_selected(
        self, query: torch.Tensor, kv: PagedCache, metadata: PagedMetadata, positions: torch.Tensor
    ) -> torch.Tensor:
        query, positions = self._rows(query), positions.contiguous()
        out = workspace.empty((query.shape[0], self.spec.num_heads * self.spec.value_size), self._dtype)
        if metadata.num_tokens < query.shape[0]:
            out[metadata.num_tokens :].zero_()
        self._attention_selected(
            metadata.handle, query.data_ptr(), query.stride(0), positions.data_ptr(), kv.address, out.data_ptr()
        )
        return out

    def fill(self, kv: PagedCache, value: float) -> None:
        keys, *scales = kv
        cache_views.fill([keys[..., : self.spec.head_size]], value)
        cache_views.fill(scales, value)

    def read_slots(self, kv: PagedCache, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        keys, *scales = kv
        read = keys.flatten(0, 1)[slots, : self.spec.head_size].unsqueeze(1)
        return [read, *(part.flatten(0, 1)[slots].unsqueeze(1) for part in scales)]
