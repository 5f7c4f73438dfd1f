"""Paged attention in plain torch, for machines where the compiled kernels are missing.

One request at a time: its blocks, and no others, are gathered; two matrix products and a softmax in float32 do the
rest.
Slower than the kernels at every size, with the same results up to rounding.

    key, value cache   [num_blocks, block_size, num_kv_heads, head_size], each
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mvllm.plugin_api import AttentionBackend, AttentionSpec, BatchLayout, KVLayout
from mvllm_cpu.memory import zeros

BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 4, 2, 1)
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Cache = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RequestSpan:
    """One request's part of a step.

    Attributes:
        begin, end: Its tokens among the step's.
        seq_len: Its sequence's length after the step.
        first_key: First key that any of its queries sees.
        blocks: [n] int64, the blocks that hold keys `first_key - first_key % block_size` to `seq_len`.
    """

    begin: int
    end: int
    seq_len: int
    first_key: int
    blocks: torch.Tensor


@dataclass(frozen=True)
class TorchMetadata:
    """What a step needs, the same for all layers of a spec.

    Attributes:
        spans: One per request.
        tokens: [n] int64: the step's tokens that are stored.
        slots: [n] int64: where.
    """

    spans: list[RequestSpan]
    tokens: torch.Tensor
    slots: torch.Tensor


def spec_problems(spec: AttentionSpec) -> list[str]:
    """Reasons why no backend of this platform takes `spec`."""
    problems = [
        f"{what} {name} is not supported (supported: {', '.join(KV_DTYPES)})"
        for what, name in (("compute dtype", spec.dtype), ("KV cache dtype", spec.kv_dtype))
        if name not in KV_DTYPES
    ]
    if spec.num_kv_heads < 1 or spec.num_heads % spec.num_kv_heads:
        problems.append(f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} key/value heads evenly")
    return problems


class TorchAttention(AttentionBackend):
    """Paged attention through torch operations."""

    @classmethod
    def validate(cls, spec: AttentionSpec) -> list[str]:
        return spec_problems(spec)

    def kv_layout(self) -> KVLayout:
        per_tensor = self.spec.num_kv_heads * self.spec.head_size * KV_DTYPES[self.spec.kv_dtype].itemsize
        return KVLayout(block_sizes=BLOCK_SIZES, bytes_per_token=2 * per_tensor)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Cache:
        shape = (num_blocks, block_size, self.spec.num_kv_heads, self.spec.head_size)
        dtype = KV_DTYPES[self.spec.kv_dtype]
        return zeros(shape, dtype), zeros(shape, dtype)

    def build_metadata(self, batch: BatchLayout) -> TorchMetadata:
        window = self.spec.sliding_window
        spans = []
        for request in range(batch.num_requests):
            begin, end = int(batch.query_start_loc[request]), int(batch.query_start_loc[request + 1])
            seq_len = int(batch.seq_lens[request])
            first_query = seq_len - (end - begin)
            first_key = 0 if window is None else max(0, first_query - window + 1)
            blocks = batch.block_table[request, first_key // batch.block_size : -(-seq_len // batch.block_size)]
            spans.append(RequestSpan(begin, end, seq_len, first_key, torch.from_numpy(blocks.astype(np.int64))))
        stored = np.flatnonzero(batch.slot_mapping >= 0)
        return TorchMetadata(
            spans=spans,
            tokens=torch.from_numpy(stored),
            slots=torch.from_numpy(batch.slot_mapping[stored].astype(np.int64)),
        )

    def write_kv(self, kv: Cache, key: torch.Tensor, value: torch.Tensor, metadata: TorchMetadata) -> None:
        for cache, new in zip(kv, (key, value)):
            cache.flatten(0, 1)[metadata.slots] = new[metadata.tokens].to(cache.dtype)

    def forward(
        self, query: torch.Tensor, kv: Cache, metadata: TorchMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = query.new_zeros(query.shape[0], self.spec.num_heads * self.spec.head_size)
        for span in metadata.spans:
            if span.end > span.begin:
                out[span.begin : span.end] = self._attend(query[span.begin : span.end], kv, span, sinks)
        return out

    def copy_blocks(self, kv: Cache, source: torch.Tensor, destination: torch.Tensor) -> None:
        for cache in kv:
            cache[destination] = cache[source]

    def _attend(self, query: torch.Tensor, kv: Cache, span: RequestSpan, sinks: torch.Tensor | None) -> torch.Tensor:
        """[n, num_heads, head_size] to [n, num_heads * head_size]."""
        spec, num_queries = self.spec, query.shape[0]
        group = spec.num_heads // spec.num_kv_heads
        key, value = (self._gather(cache, span) for cache in kv)  # [num_kv_heads, keys, head_size]
        rows = query.float().view(num_queries, spec.num_kv_heads, group, -1)
        rows = rows.permute(1, 2, 0, 3).reshape(spec.num_kv_heads, group * num_queries, -1)
        scores = (rows @ key.transpose(1, 2)).view(spec.num_heads, num_queries, -1) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores.masked_fill_(~self._visible(num_queries, span), -torch.inf)
        if sinks is not None:
            extra = sinks.float().view(-1, 1, 1).expand(-1, num_queries, 1)
            weights = torch.cat([scores, extra], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        mixed = weights.reshape(spec.num_kv_heads, group * num_queries, -1) @ value
        return mixed.view(spec.num_heads, num_queries, -1).transpose(0, 1).flatten(1).to(query.dtype)

    def _gather(self, cache: torch.Tensor, span: RequestSpan) -> torch.Tensor:
        first = span.first_key % cache.shape[1]
        count = span.seq_len - span.first_key
        return cache[span.blocks].flatten(0, 1)[first : first + count].float().transpose(0, 1)

    def _visible(self, num_queries: int, span: RequestSpan) -> torch.Tensor:
        """[queries, keys]: which key each query sees."""
        queries = torch.arange(span.seq_len - num_queries, span.seq_len).unsqueeze(1)
        keys = torch.arange(span.first_key, span.seq_len).unsqueeze(0)
        visible = keys <= queries
        if self.spec.sliding_window is not None:
            visible &= keys > queries - self.spec.sliding_window
        return visible
