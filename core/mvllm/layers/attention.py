"""The attention of one layer: a spec, the backend that serves it, and this layer's KV cache."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import HeadShare
from mvllm.platform.attention import AttentionSpec, KVCache


class Attention(nn.Module):
    """Paged attention over this rank's heads.

    Args:
        ctx: Build context.
        heads: This rank's share of the heads.
        head_size: Elements per head.
        scale: Factor on query-key products.
        sliding_window, soft_cap: As in AttentionSpec.
        sinks: [heads on this rank], where each query head has a learned extra logit.

    Attributes:
        spec: What was asked of the backend.
        backend: The platform's backend.
        metadata_key: Where a step has the backend's metadata: under the spec, unless layers of that spec have several
            block tables.
        kv_cache: This layer's cache; whoever allocates it sets it. While it is None (a profiling pass before memory is
            divided) the layer answers zeros.
    """

    def __init__(
        self,
        ctx: BuildContext,
        heads: HeadShare,
        head_size: int,
        scale: float,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: nn.Parameter | None = None,
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
        )
        self.backend = ctx.attention(self.spec)
        self.metadata_key: Hashable = self.spec
        self.kv_cache: KVCache | None = None
        self.sinks = sinks

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Stores keys and values, and attends.

        Args:
            query: [T, heads on this rank, head_size].
            key, value: [T, key/value heads on this rank, head_size].
            step: The step, with metadata for this layer.

        Returns:
            [T, heads on this rank * head_size].
        """
        if self.kv_cache is None:
            return query.new_zeros(query.shape[0], query.shape[1] * query.shape[2])
        metadata = step.metadata[self.metadata_key]
        self.backend.write_kv(self.kv_cache, key, value, metadata)
        return self.backend.forward(query, self.kv_cache, metadata, self.sinks)
