"""Attention backend without Triton: torch's `scaled_dot_product_attention` over keys and values gathered from the
cache.

For layers that the Triton kernels do not support, and for installations without Triton. The blocks of a sequence are
gathered into contiguous tensors for torch's attention. Decodes (requests with one query) are batched, up to
GATHERED_TOKENS:

    decodes    lengths 3 7 5     [3, heads, 1, size] over [3, heads, longest, size], with a mask for lengths and window
    others     one by one        [1, heads, queries, size] over [1, heads, keys, size], with a causal or window mask

    cache of a layer   keys, values   [num_blocks, block_size, num_kv_heads, head_size or value_size]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from mvllm.plugin_api import AttentionSpec, BatchLayout, KVLayout
from mvllm_torch_gpu.block_copies import PagedBlocks

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 4, 2, 1)
GATHERED_TOKENS = 1 << 16
"""Maximum tokens, padding included, whose keys and values are gathered at once for decodes."""

Cache = tuple[torch.Tensor, ...]
"""Keys, and values unless they are part of the keys."""


@dataclass(frozen=True)
class _RequestGroup:
    """Requests computed together: one request, or several with one query each.

    Attributes:
        tokens: Device, int64: indices of their tokens in the step, [n] or [queries].
        blocks: Device, int64 [n, blocks]: the blocks that hold the keys from the first visible one on.
        seen: Device, bool [n, queries, keys]: the keys that each query attends to.
        real: Device, bool [n, keys]: the keys that belong to the request.
        decodes: Whether each request has one query.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    seen: torch.Tensor
    real: torch.Tensor
    decodes: bool


@dataclass(frozen=True)
class SdpaMetadata:
    """Metadata of one step.

    Attributes:
        pieces: Groups of requests.
        slots: Device, int64: the slots to write.
        rows: Device, int64: indices of the tokens written there; None for all tokens in order.
    """

    pieces: tuple[_RequestGroup, ...]
    slots: torch.Tensor
    rows: torch.Tensor | None


class SdpaAttention(PagedBlocks):
    """Attention by `scaled_dot_product_attention`. Supports layers without soft caps, sinks and 8-bit caches."""

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        problems = [
            f"{what} {name} is not supported (supported: {', '.join(DTYPES)})"
            for what, name in (("compute dtype", spec.dtype), ("KV cache dtype", spec.kv_dtype))
            if name not in DTYPES
        ]
        if spec.soft_cap is not None:
            problems.append("soft caps are not supported")
        if spec.sinks:
            problems.append("sinks are not supported")
        return problems + spec.contradictions()

    def kv_layout(self) -> KVLayout:
        spec = self.spec
        per_head = sum(self._sizes()) * DTYPES[spec.kv_dtype].itemsize
        return KVLayout(block_sizes=BLOCK_SIZES, bytes_per_token=spec.num_kv_heads * per_head)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Cache:
        slots, dtype = (num_blocks, block_size, self.spec.num_kv_heads), DTYPES[self.spec.kv_dtype]
        try:
            return tuple(torch.zeros((*slots, size), dtype=dtype, device=device) for size in self._sizes())
        except RuntimeError as e:
            size = math.prod(slots) * sum(self._sizes()) * dtype.itemsize
            raise MemoryError(
                f"The KV cache of one layer needs {size / 2**30:.2f} GiB, which are not free on the device. Lower "
                "--memory-utilization, or set fewer blocks."
            ) from e

    def build_metadata(self, batch: BatchLayout) -> SdpaMetadata:
        slots, rows = batch.slot_mapping_device, None
        if batch.slot_mapping.size and batch.slot_mapping.min() < 0:
            kept = torch.from_numpy(np.flatnonzero(batch.slot_mapping >= 0))
            rows = kept.to(slots.device)
            slots = slots.index_select(0, rows)
        return SdpaMetadata(tuple(self._pieces(batch)), slots.long(), rows)

    def write_kv(self, kv: Cache, key: torch.Tensor, value: torch.Tensor, metadata: SdpaMetadata) -> None:
        for cache, new in zip(kv, (key,) if self.spec.values_in_keys else (key, value), strict=True):
            kept = new if metadata.rows is None else new.index_select(0, metadata.rows)
            cache.flatten(0, 1).index_copy_(0, metadata.slots, kept.to(cache.dtype))

    def forward(
        self, query: torch.Tensor, kv: Cache, metadata: SdpaMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        spec = self.spec
        output = torch.zeros((*query.shape[:2], spec.value_size), dtype=query.dtype, device=query.device)
        for piece in metadata.pieces:
            keys, values = self._gathered(kv, piece, query.dtype)
            asked = query.index_select(0, piece.tokens)
            asked = asked.unsqueeze(2) if piece.decodes else asked.transpose(0, 1).unsqueeze(0)
            group = spec.num_heads // spec.num_kv_heads  # query heads that share keys are adjacent
            found = scaled_dot_product_attention(
                asked,
                keys.repeat_interleave(group, 1),
                values.repeat_interleave(group, 1),
                attn_mask=piece.seen.unsqueeze(1),
                scale=spec.scale,
            )
            found = found.squeeze(2) if piece.decodes else found.squeeze(0).transpose(0, 1)
            output.index_copy_(0, piece.tokens, found)
        return output.flatten(1)

    def _sizes(self) -> tuple[int, ...]:
        """Head sizes of the stored parts: keys, and values unless they are part of the keys."""
        spec = self.spec
        return (spec.head_size,) if spec.values_in_keys else (spec.head_size, spec.value_size)

    def _gathered(self, kv: Cache, piece: _RequestGroup, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a group, [n, num_kv_heads, keys, size]; unused slots, which may be NaN, become zero."""
        parts = []
        for cache in kv:
            part = cache[piece.blocks].flatten(1, 2)[:, : piece.real.shape[1]]
            parts.append(torch.where(piece.real[:, :, None, None], part, 0).transpose(1, 2).to(dtype))
        return parts[0], parts[-1][..., : self.spec.value_size]

    def _pieces(self, batch: BatchLayout) -> Iterator[_RequestGroup]:
        """Groups of the step's requests. Decodes are batched, sorted by length to reduce padding."""
        lengths = np.diff(batch.query_start_loc[: batch.num_requests + 1])
        for request in np.flatnonzero(lengths > 1):
            yield self._piece(batch, np.array([request]))
        decodes = np.flatnonzero(lengths == 1)
        decodes = decodes[np.argsort(batch.seq_lens[decodes], kind="stable")]
        begin = 0
        while begin < len(decodes):
            end = begin + 1
            while end < len(decodes) and (end + 1 - begin) * batch.seq_lens[decodes[end]] <= GATHERED_TOKENS:
                end += 1
            yield self._piece(batch, decodes[begin:end])
            begin = end

    def _piece(self, batch: BatchLayout, requests: np.ndarray) -> _RequestGroup:
        """The group of these requests: one request, or several with one query each."""
        window, size = self.spec.sliding_window, batch.block_size
        start, stop = batch.query_start_loc[requests], batch.query_start_loc[requests + 1]
        end = batch.seq_lens[requests].astype(np.int64)
        begin = end - (stop - start)  # position of the first query
        first = np.zeros_like(begin) if window is None else np.maximum(0, begin - window + 1) // size
        width = int((-(-end // size) - first).max())
        columns = np.minimum(first[:, None] + np.arange(width), batch.block_table.shape[1] - 1)
        key_at = first[:, None] * size + np.arange(width * size)
        num_keys = int((end - first * size).max())
        key_at = key_at[:, :num_keys]
        query_at = begin[:, None] + np.arange(int((stop - start).max()))
        seen = key_at[:, None, :] <= query_at[:, :, None]
        if window is not None:
            seen &= key_at[:, None, :] > query_at[:, :, None] - window
        decodes = bool((stop - start == 1).all())
        tokens = start.astype(np.int64) if decodes else np.arange(int(start[0]), int(stop[0]))
        device = batch.block_table_device.device

        def placed(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        real = key_at < end[:, None]
        # Columns after a request's last block are undefined, so block 0 is read instead.
        blocks = np.where(columns * size < end[:, None], batch.block_table[requests[:, None], columns], 0)
        return _RequestGroup(placed(tokens), placed(blocks.astype(np.int64)), placed(seen), placed(real), decodes)
