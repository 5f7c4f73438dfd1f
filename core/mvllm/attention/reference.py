"""Paged attention in plain torch: the reference that every backend is compared with.

For each request it gathers exactly the blocks that its queries attend to, and computes softmax attention over them in
float32, for at most 256 queries at a time, which bounds the memory for scores. Nothing is padded.

    keys, values: [num_blocks, block_size, num_kv_heads, head_size or value_size]    scales of each: the same without
                                                                                     the last dimension

    sequence   0 ............. first ............ begin ............ end
                               └ visible keys ──────────────────────┘
                                                  └ this step's queries
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mvllm.attention import kv_quantization
from mvllm.attention.selection import best_positions, index_scores, query_tile
from mvllm.ops.dtypes import torch_dtype
from mvllm.platform.attention import AttentionBackend, AttentionSpec, BatchLayout, KVLayout

_BLOCK_SIZES = (16, 32, 8, 64, 128, 256, 4, 2, 1)
_KV_DTYPES = ("float32", "bfloat16", "float16", *kv_quantization.LARGEST)
_QUERY_TILE = 256
_SELECTED_ELEMENTS = 1 << 23
"""Elements of selected keys that are gathered at once, which bounds their memory to 32 MiB."""
_HOST_DEVICE_TYPE = torch.from_numpy(np.empty(0)).device.type


Cache = torch.Tensor | tuple[torch.Tensor, ...]
"""The KV cache of one layer: keys, values, and with 8 bits their scales, as a tuple.

Keys and values of equal shape without scales are one tensor [2, ...], which is indexed like a tuple of two.
"""


@dataclass(frozen=True)
class _Sequence:
    """One request of the step.

    Attributes:
        tokens: Its slice of the step's tokens.
        begin: Position of its first query.
        end: Its length after the step.
        first: First position that any of its queries attends to, rounded down to a block.
        blocks: Device, the blocks that hold [first, end).
        visible_lens: Device, [tokens]: how many leading positions each query sees; None if attention is causal.
    """

    tokens: slice
    begin: int
    end: int
    first: int
    blocks: torch.Tensor
    visible_lens: torch.Tensor | None = None

    def tiles(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Its tokens of the step in tiles of at most `size`: first token, end, and position of the first."""
        for start in range(self.tokens.start, self.tokens.stop, size):
            yield start, min(start + size, self.tokens.stop), self.begin + start - self.tokens.start


@dataclass(frozen=True)
class ReferenceMetadata:
    """Attention metadata of one step.

    Attributes:
        sequences: The requests.
        slots: Device, int64: the slots to write.
        rows: Device, int64: the tokens to write; None for all, in order.
        requests: Device, int64: the request of each token without padding; only if the spec has index_topk.
        block_table, max_seq_len: Likewise; as in BatchLayout, the table on the device.
    """

    sequences: tuple[_Sequence, ...]
    slots: torch.Tensor
    rows: torch.Tensor | None
    requests: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    max_seq_len: int = 0


class ReferenceAttention(AttentionBackend):
    """The reference backend. Supports every spec and power-of-two block sizes, with a Python loop over requests."""

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        reasons = spec.contradictions()
        if spec.kv_dtype not in _KV_DTYPES:
            reasons.append(f"keys and values are stored as {', '.join(_KV_DTYPES)}, not {spec.kv_dtype}")
        return reasons

    def kv_layout(self) -> KVLayout:
        sizes, spec = self._sizes(), self.spec
        if spec.kv_dtype in kv_quantization.LARGEST:
            per_head = sum(sizes) + len(sizes) * torch.float32.itemsize
        else:
            per_head = sum(sizes) * torch_dtype(spec.kv_dtype).itemsize
        return KVLayout(_BLOCK_SIZES, spec.num_kv_heads * per_head)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Cache:
        """One tensor for keys and values, [2, ...], if both have one shape and no scales; otherwise a tuple."""
        spec, sizes = self.spec, self._sizes()
        slots = (num_blocks, block_size, spec.num_kv_heads)
        try:
            if spec.kv_dtype in kv_quantization.LARGEST:
                stored = kv_quantization.STORED_AS[spec.kv_dtype]
                codes = [_zeros((*slots, size), stored, device) for size in sizes]
                scales = [_zeros(slots, torch.float32, device) for _ in sizes]
                return (*codes, *scales)
            dtype = torch_dtype(spec.kv_dtype)
            if len(sizes) == 2 and sizes[0] == sizes[1]:
                return _zeros((2, *slots, sizes[0]), dtype, device)
            return tuple(_zeros((*slots, size), dtype, device) for size in sizes)
        except (RuntimeError, MemoryError) as e:  # torch's allocators raise them with different messages
            raise MemoryError(f"A KV cache of {num_blocks} blocks of {block_size} tokens does not fit: {e}") from e

    def build_metadata(self, batch: BatchLayout) -> ReferenceMetadata:
        window = self.spec.sliding_window
        sequences = []
        for request in range(batch.num_requests):
            start, stop = int(batch.query_start_loc[request]), int(batch.query_start_loc[request + 1])
            if start == stop:
                continue
            end = int(batch.seq_lens[request])
            begin = end - (stop - start)
            first_block = 0 if window is None else max(0, begin - window + 1) // batch.block_size
            num_blocks = -(-end // batch.block_size)
            blocks = batch.block_table_device[request, first_block:num_blocks]
            tokens, first = slice(start, stop), first_block * batch.block_size
            visible = None if batch.visible_lens_device is None else batch.visible_lens_device[tokens]
            sequences.append(_Sequence(tokens, begin, end, first, blocks, visible))
        slots, rows = batch.slot_mapping_device, None
        if batch.slot_mapping.size and batch.slot_mapping.min() < 0:
            kept = torch.from_numpy(np.flatnonzero(batch.slot_mapping >= 0))
            rows = kept.to(slots.device)
            slots = slots.index_select(0, rows)
        if self.spec.index_topk is None:
            return ReferenceMetadata(tuple(sequences), slots.long(), rows)
        repeated = np.repeat(np.arange(batch.num_requests), np.diff(batch.query_start_loc))
        requests = torch.from_numpy(repeated).to(slots.device)
        table, longest = batch.block_table_device, batch.max_seq_len
        return ReferenceMetadata(tuple(sequences), slots.long(), rows, requests, table, longest)

    def write_kv(self, kv: Cache, key: torch.Tensor, value: torch.Tensor, metadata: ReferenceMetadata) -> None:
        new_values = [key] if self.spec.values_in_keys else [key, value]
        if self.spec.kv_dtype in kv_quantization.LARGEST:
            encoded = [kv_quantization.encode(new, self.spec.kv_dtype) for new in new_values]
            new_values = [codes for codes, _ in encoded] + [scales for _, scales in encoded]
        for cache, new in zip(kv, new_values, strict=True):
            kept = new if metadata.rows is None else new.index_select(0, metadata.rows)
            cache.flatten(0, 1).index_copy_(0, metadata.slots, kept.to(cache.dtype))

    def forward(
        self,
        query: torch.Tensor,
        kv: Cache,
        metadata: ReferenceMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape = (*query.shape[:2], self.spec.value_size)
        output = torch.zeros(shape, dtype=query.dtype, device=query.device)
        for sequence in metadata.sequences:
            num_keys = sequence.end - sequence.first
            key, value = self._read(kv, sequence.blocks, num_keys)
            for start, stop, begin in sequence.tiles(_QUERY_TILE):
                at, seen = begin - sequence.first, sequence.visible_lens
                if seen is not None:
                    seen = seen[start - sequence.tokens.start : stop - sequence.tokens.start] - sequence.first
                output[start:stop] = self._attend(query[start:stop].float(), key, value, at, seen, sinks)
        return output.flatten(1)

    def select(
        self, query: torch.Tensor, weights: torch.Tensor, kv: Cache, metadata: ReferenceMetadata
    ) -> torch.Tensor:
        spec, top_k = self.spec, self._index_topk
        selected = torch.full((query.shape[0], top_k), -1, dtype=torch.int32, device=query.device)
        for sequence in metadata.sequences:
            keys = self._read(kv, sequence.blocks, sequence.end)[0].squeeze(1)
            for start, stop, begin in sequence.tiles(query_tile(spec.num_heads, sequence.end)):
                scores = index_scores(query[start:stop].float(), weights[start:stop].float(), keys, spec.scale)
                best = best_positions(scores, begin, top_k)
                selected[start:stop, : best.shape[1]] = best
        return selected

    def forward_selected(
        self, query: torch.Tensor, kv: Cache, metadata: ReferenceMetadata, positions: torch.Tensor
    ) -> torch.Tensor:
        assert metadata.requests is not None and metadata.block_table is not None, "the spec has index_topk"
        spec, block_size, num_tokens = self.spec, kv[0].shape[1], len(metadata.requests)
        output = torch.zeros(query.shape[0], spec.num_heads * spec.value_size, dtype=query.dtype, device=query.device)
        width = min(self._index_topk, metadata.max_seq_len)
        step = max(1, _SELECTED_ELEMENTS // max(1, width * spec.head_size))
        for tile in (slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)):
            chosen = positions[tile, :width].long()
            at = chosen.clamp(min=0)
            blocks = metadata.block_table[metadata.requests[tile].unsqueeze(1), at // block_size]
            key, value = self._read_slots(kv, blocks.long() * block_size + at % block_size)
            scores = torch.matmul(query[tile].float(), key.transpose(1, 2)) * spec.scale
            weights = torch.softmax(scores.masked_fill((chosen < 0).unsqueeze(1), float("-inf")), dim=-1)
            output[tile] = torch.matmul(weights, value).flatten(1).to(query.dtype)
        return output

    def copy_blocks(self, kv: Cache, source: torch.Tensor, destination: torch.Tensor) -> None:
        for cache in kv:
            cache[destination] = cache[source]

    @property
    def _index_topk(self) -> int:
        assert self.spec.index_topk is not None, "only specs with index_topk have selected positions"
        return self.spec.index_topk

    def _sizes(self) -> tuple[int, ...]:
        """Head sizes of what is stored: keys, and values unless they are part of the keys."""
        return (self.spec.head_size,) if self.spec.values_in_keys else (self.spec.head_size, self.spec.value_size)

    def _read(self, kv: Cache, blocks: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 keys and values of the first `num_keys` tokens in `blocks`: [num_keys, kv_heads, size]."""
        parts = [cache.index_select(0, blocks).flatten(0, 1)[:num_keys] for cache in kv]
        return self._decoded(parts)

    def _read_slots(self, kv: Cache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 keys and values of the slots [n, k], for one key/value head: [n, k, size]."""
        parts = [cache.flatten(0, 1).squeeze(1)[slots] for cache in kv]
        return self._decoded(parts)

    def _decoded(self, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 keys and values from what is stored of some tokens."""
        if self.spec.kv_dtype in kv_quantization.LARGEST:
            pairs = zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)
            parts = [kv_quantization.decode(codes, scales, self.spec.kv_dtype) for codes, scales in pairs]
        key, value = parts[0].float(), parts[-1].float()
        return key, value[..., : self.spec.value_size]

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        begin: int,
        visible_lens: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of queries [n, heads, size] at positions begin, begin + 1, ... over keys [m, kv_heads, size].

        Args:
            visible_lens: [n]: the number of leading keys that each query sees; None for those up to its position.
        """
        n, m, spec = query.shape[0], key.shape[0], self.spec
        # Query heads that share a key/value head are adjacent: [n, kv_heads, group, size].
        grouped = query.unflatten(1, (spec.num_kv_heads, -1))
        scores = torch.einsum("nkgd,mkd->kgnm", grouped, key) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        query_at = torch.arange(begin, begin + n, device=query.device).unsqueeze(-1)
        key_at = torch.arange(m, device=query.device)
        masked = key_at > query_at if visible_lens is None else key_at >= visible_lens.unsqueeze(-1)
        if spec.sliding_window is not None:
            masked |= key_at <= query_at - spec.sliding_window
        scores = scores.masked_fill(masked, float("-inf"))
        if sinks is not None:
            extra = sinks.float().view(spec.num_kv_heads, -1, 1, 1).expand(-1, -1, n, 1)
            scores = torch.cat((scores, extra), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :m]
        return torch.einsum("kgnm,mkd->nkgd", weights, value).flatten(1, 2).to(query.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. On the host a page takes memory only when it is written: a cache is large and fills slowly."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != _HOST_DEVICE_TYPE or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
