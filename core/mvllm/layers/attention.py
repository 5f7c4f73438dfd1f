"""The attention layer: an AttentionSpec, its platform backend, and this layer's KV cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import torch
from torch import nn

from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import HeadShard
from mvllm.layers.weight_target import WeightTarget
from mvllm.platform.attention import AttentionMetadata, AttentionSpec, KVCache


class Attention(nn.Module):
    """Paged attention over this rank's heads.

    Args:
        ctx: Build context.
        heads: This rank's heads.
        head_size: Elements per head.
        scale: Factor on query-key products.
        sliding_window, soft_cap: As in AttentionSpec.
        sinks: [heads on this rank]: the learned extra logit of each query head; None without sinks.
        latent_size: For MLA: values are the first `latent_size` elements of the keys and are not stored separately;
            None for other attention.
        chunk_size: A query sees the keys of its own chunk of so many tokens only; None for attention without chunks.
        index_topk, indexer: As in AttentionSpec.
        non_causal_spans: Images in prompts attend in both directions in this layer, if the platform supports that.

    Attributes:
        spec: The spec of the backend.
        chunk_size: As given.
        backend: The platform's backend.
        metadata_key: Key of the backend's metadata in `ForwardStep.metadata`: the spec, unless layers of that spec have
            several block tables, or some have chunks.
        kv_cache: This layer's cache, set when the KV cache is allocated. While it is None (in the profiling step) the
            layer returns zeros.
    """

    def __init__(
        self,
        ctx: BuildContext,
        heads: HeadShard,
        head_size: int,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: nn.Parameter | None = None,
        latent_size: int | None = None,
        chunk_size: int | None = None,
        index_topk: int | None = None,
        indexer: bool = False,
        non_causal_spans: bool = False,
    ) -> None:
        super().__init__()
        self.spec = AttentionSpec(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=head_size,
            dtype=ctx.dtype_name,
            kv_dtype=ctx.kv_dtype,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks is not None,
            value_head_size=latent_size,
            values_in_keys=latent_size is not None,
            batch_invariant=ctx.batch_invariant,
            index_topk=index_topk,
            indexer=indexer,
            non_causal_spans=non_causal_spans and ctx.non_causal_spans,
        )
        self.chunk_size = chunk_size
        self.backend = ctx.attention(self.spec)
        self.metadata_key: Hashable = self.spec if chunk_size is None else (self.spec, chunk_size)
        self.kv_cache: KVCache | None = None
        self.sinks = sinks

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: ForwardStep,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores keys and values, and computes attention.

        Args:
            query: [T, heads on this rank, head_size].
            key, value: [T, key/value heads on this rank, head_size or size of a value].
            step: The step, with metadata for this layer.
            positions: [T, index_topk]: the positions that each query attends to, with `index_topk`; else None.

        Returns:
            [T, heads on this rank * size of a value].
        """
        if self.kv_cache is None:
            return query.new_zeros(query.shape[0], query.shape[1] * self.spec.value_size)
        metadata = step.metadata[self.metadata_key]
        self.backend.write_kv(self.kv_cache, key, value, metadata)
        if positions is not None:
            return self.backend.forward_selected(query, self.kv_cache, metadata, positions)
        return self.attend(query, metadata)

    def select(self, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """For an indexer: stores keys and selects positions; arguments and result as `AttentionBackend.select`.

        Without a KV cache (in the profiling step), no position is selected.
        """
        if self.kv_cache is None:
            assert self.spec.index_topk is not None, "an indexer has index_topk"
            return torch.full((query.shape[0], self.spec.index_topk), -1, dtype=torch.int32, device=query.device)
        metadata = step.metadata[self.metadata_key]
        self.backend.write_kv(self.kv_cache, key, key, metadata)
        return self.backend.select(query, weights, self.kv_cache, metadata)

    def attend(self, query: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Attention over the cache, after the step's keys and values have been stored; as `forward`."""
        assert self.kv_cache is not None, "the KV cache is allocated"
        return self.backend.forward(query, self.kv_cache, metadata, self.sinks)


class Sinks(nn.Module):
    """Attention sinks: a learned extra logit of each query head, for `Attention`.

    Args:
        ctx: Build context.
        name: The checkpoint tensor.
        num_heads: Heads of the whole model.
        heads: This rank's heads.

    Attributes:
        weight: [heads on this rank].
    """

    partitions: Mapping[str, int] = {"weight": 0}

    def __init__(self, ctx: BuildContext, name: str, num_heads: int, heads: HeadShard) -> None:
        super().__init__()
        self.name, self._num_heads, self._first = name, num_heads, heads.first_head
        self.weight = ctx.parameter(heads.num_heads)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint tensor and its target on this rank."""
        size = len(self.weight)
        mine = slice(self._first, self._first + size)
        yield self.name, WeightTarget(self.weight, (self._num_heads,), (mine,), (slice(0, size),))
