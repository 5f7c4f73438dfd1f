"""Paged attention in XLA operations, with static shapes and without dependence on values or host synchronization.

    keys, values: [num_blocks, block_size, num_kv_heads, head_size or value_size]

Each tile (see `tiles`) gathers all blocks of its request's row of the block table, computes scores of its queries
against all of them in float32, and masks the keys that a query does not attend to. One scatter writes keys and values
to the flat cache, in place; slots of padding are out of range, and XLA drops them. All of a step's indices are computed
on the host and copied to the device at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from mvllm.plugin_api import AttentionBackend, AttentionSpec, BatchLayout, KVLayout
from mvllm_tpu.tiles import NOWHERE, TileShape, cut

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 4, 2, 1)
_MOST_GATHERED = 1 << 28
"""Maximum bytes of gathered keys, values and scores at a time."""

Cache = tuple[torch.Tensor, ...]
"""Keys, and values unless they are part of the keys."""


@dataclass(frozen=True)
class XlaMetadata:
    """Metadata of one step. All tensors are int32, on the device.

    Attributes:
        shape: Shape of the tiles.
        slots: [T]: slot of each token; NOWHERE for padding.
        place: [T]: see Tiles.
        request, first_token, first_position, length: [tiles]: see Tiles.
        block_table: [R, pages].
    """

    shape: TileShape
    slots: torch.Tensor
    place: torch.Tensor
    request: torch.Tensor
    first_token: torch.Tensor
    first_position: torch.Tensor
    length: torch.Tensor
    block_table: torch.Tensor


class XlaAttention(AttentionBackend):
    """Attention backend in torch operations that every XLA device compiles."""

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        reasons = spec.contradictions()
        for what, name in (("computes in", spec.dtype), ("stores keys and values as", spec.kv_dtype)):
            if name not in _DTYPES:
                reasons.append(f"it {what} {', '.join(_DTYPES)}, not {name}")
        return reasons

    def kv_layout(self) -> KVLayout:
        elements = sum(heads * size for heads, size in self._parts())
        return KVLayout(_BLOCK_SIZES, elements * _DTYPES[self.spec.kv_dtype].itemsize)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Cache:
        dtype = _DTYPES[self.spec.kv_dtype]
        self.require_room(num_blocks * block_size * self.kv_layout().bytes_per_token, device)
        try:
            shapes = [(num_blocks, block_size, *part) for part in self._parts()]
            caches = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
            self.place(caches)
            self.materialize()
        except RuntimeError as e:  # the text depends on the runtime
            raise MemoryError(f"A KV cache of {num_blocks} blocks of {block_size} tokens does not fit: {e}") from e
        return caches

    def require_room(self, size: int, device: torch.device) -> None:
        """Checks that `size` bytes are free.

        Raises:
            MemoryError: Fewer bytes are free.
        """

    def place(self, caches: Cache) -> None:
        """Shards a new cache if a worker drives several devices."""

    def materialize(self) -> None:
        """Runs recorded operations, on lazy devices."""

    def reuse_buffer(self, cache: torch.Tensor) -> None:
        """Called before a cache is written in a step: a compiled step must write to the cache's own memory."""

    def build_metadata(self, batch: BatchLayout) -> XlaMetadata:
        tiles = cut(batch.query_start_loc, batch.seq_lens, batch.num_tokens)
        slots = np.where(batch.slot_mapping < 0, NOWHERE, batch.slot_mapping).astype(np.int32)
        parts = (slots, tiles.place, tiles.request, tiles.first_token, tiles.first_position, tiles.length)
        packed = torch.from_numpy(np.concatenate(parts)).to(batch.block_table_device.device)
        # Slices, because the results of torch_xla's split cannot be indices.
        ends = list(accumulate(len(part) for part in parts))
        stored_at, place, request, first_token, first_position, length = (
            packed[a:b] for a, b in zip([0, *ends], ends, strict=False)
        )
        return XlaMetadata(
            tiles.shape, stored_at, place, request, first_token, first_position, length, batch.block_table_device
        )

    def write_kv(self, kv: Cache, key: torch.Tensor, value: torch.Tensor, metadata: XlaMetadata) -> None:
        for cache, new in zip(kv, (key, value), strict=False):  # one cache if values are part of the keys
            self.reuse_buffer(cache)
            cache.flatten(0, 1).index_copy_(0, metadata.slots.long(), new.to(cache.dtype))

    def forward(
        self, query: torch.Tensor, kv: Cache, metadata: XlaMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        size, count = metadata.shape.size, metadata.shape.count
        along = torch.arange(size, device=query.device, dtype=torch.int32)
        within = torch.minimum(along, metadata.length.unsqueeze(1) - 1)  # after the end: the last query again
        tokens = (metadata.first_token.unsqueeze(1) + within).flatten()
        queries = query.index_select(0, tokens).unflatten(0, (count, size)).float()
        positions = metadata.first_position.unsqueeze(1) + within
        tables = metadata.block_table.index_select(0, metadata.request)
        step = self._tiles_at_a_time(metadata, kv)
        results = [
            self._attend(queries[i : i + step], positions[i : i + step], tables[i : i + step], kv, sinks)
            for i in range(0, count, step)
        ]
        result = results[0] if len(results) == 1 else torch.cat(results)
        return result.flatten(0, 1).index_select(0, metadata.place).flatten(1).to(query.dtype)

    def copy_blocks(self, kv: Cache, source: torch.Tensor, destination: torch.Tensor) -> None:
        for cache in kv:
            cache.index_copy_(0, destination, cache.index_select(0, source))

    def _parts(self) -> tuple[tuple[int, int], ...]:
        """(heads, head size) of the stored parts: keys, and values unless they are part of the keys."""
        spec = self.spec
        sizes = (spec.head_size,) if spec.values_in_keys else (spec.head_size, spec.value_size)
        return tuple((spec.num_kv_heads, size) for size in sizes)

    def _gathered(self, kv: Cache, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these blocks, [len(blocks), block_size, num_kv_heads, size] each, in the cache's dtype."""
        parts = [cache.index_select(0, blocks) for cache in kv]
        return parts[0], parts[-1]

    def _tiles_at_a_time(self, metadata: XlaMetadata, kv: Cache) -> int:
        spec, num_keys = self.spec, metadata.block_table.shape[1] * kv[0].shape[1]
        per_key = sum(heads * size for heads, size in self._parts()) + 2 * spec.num_heads * metadata.shape.size
        return max(1, min(metadata.shape.count, _MOST_GATHERED // (4 * per_key * num_keys)))

    def _attend(
        self,
        query: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        kv: Cache,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of queries [n, size, heads, head_size] at positions [n, size] over the blocks of tables [n, pages].

        Returns:
            float32 [n, size, heads, value_size].
        """
        spec, num_tiles = self.spec, len(query)
        gathered = self._gathered(kv, tables.flatten())
        key, value = (part.reshape(num_tiles, -1, *part.shape[2:]).float() for part in gathered)
        value = value[..., : spec.value_size]
        key_at = torch.arange(key.shape[1], device=query.device, dtype=torch.int32)
        # Slots that no query of the tile attends to may hold NaN, and 0 x NaN is NaN.
        seen = key_at <= positions[:, -1:]
        hidden = key_at > positions.unsqueeze(-1)  # [n, size, keys]
        if spec.sliding_window is not None:
            seen = seen & (key_at > positions[:, :1] - spec.sliding_window)
            hidden = hidden | (key_at <= positions.unsqueeze(-1) - spec.sliding_window)
        value = torch.where(seen[..., None, None], value, 0.0)
        # Query heads that share a key/value head are adjacent: [n, size, kv_heads, group, head_size].
        grouped = query.unflatten(2, (spec.num_kv_heads, -1))
        scores = torch.einsum("nqkgd,nmkd->nkgqm", grouped, key) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        if sinks is not None:
            extra = sinks.float().view(1, spec.num_kv_heads, -1, 1, 1).expand(num_tiles, -1, -1, query.shape[1], 1)
            scores = torch.cat((scores, extra), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
        return torch.einsum("nkgqm,nmkd->nqkgd", weights, value).flatten(2, 3)
