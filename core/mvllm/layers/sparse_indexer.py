"""SparseIndexer: selects the tokens that the queries of a layer with sparse attention attend to.

    x ────────── wk ─ norm ─ rotate ─> index key [head_dim] ─────────── the cache of the indexer's keys
    latent ───── wq_b ─ rotate ─> index queries [heads, head_dim] ──┐
    x ────────── weights_proj ─> weight of each head ───────────────┴─ `AttentionBackend.select` ─> positions

The keys are a layer of the KV cache: they lie in the same blocks as the latents of the attention layer, under the same
block tables. Every rank of a tensor-parallel group has the whole indexer and selects the same positions.

Source: DeepSeek-V3.2 (the lightning indexer).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import HeadShard, ReplicatedLinear
from mvllm.layers.norm import LayerNorm
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding

_KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class SparseConfig:
    """Sparse attention of one layer.

    Attributes:
        top_k: Tokens that a query attends to.
        num_heads, head_dim: Heads of the indexer's queries, and elements of each and of a key.
        interleaved: The rotary embedding of the indexer is interleaved.
        is_shared: The layer has no indexer, and attends to the tokens that the last layer with one has selected.
    """

    top_k: int
    num_heads: int
    head_dim: int
    interleaved: bool = False
    is_shared: bool = False


class SparseIndexer(nn.Module):
    """The indexer of one layer.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size: Size of the layer's input.
        latent_size: Size of the query latent.
        sparse: Its sizes.
        rotary: Rotary embedding of the attention layer, whose angles rotate the first elements of index heads.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        latent_size: int,
        sparse: SparseConfig,
        rotary: RotaryEmbedding,
    ) -> None:
        super().__init__()
        num_heads, head_dim = sparse.num_heads, sparse.head_dim
        self.wq_b = ReplicatedLinear(ctx, f"{name}.wq_b", latent_size, num_heads * head_dim, bias=False)
        self.wk = ReplicatedLinear(ctx, f"{name}.wk", hidden_size, head_dim, bias=False)
        self.k_norm = LayerNorm(ctx, f"{name}.k_norm", head_dim, _KEY_NORM_EPS)
        # In float32: rounding would change the selection between close scores.
        floats = ctx.floats(torch.float32)
        self.weights_proj = ReplicatedLinear(floats, f"{name}.weights_proj", hidden_size, num_heads, bias=False)
        self.keys = Attention(
            ctx,
            HeadShard(num_heads, 1, 0, 0),
            head_dim,
            head_dim**-0.5,
            latent_size=head_dim,
            index_topk=sparse.top_k,
            indexer=True,
        )
        self._head_dim, self._weight_scale = head_dim, num_heads**-0.5
        # It has the angles of `rotary`, so it is not registered as a submodule, which would allocate its own tables.
        rope = replace(rotary.rope, head_size=head_dim)
        self._rotary = [RotaryEmbedding(ctx, rope, rotary.max_len, interleaved=sparse.interleaved)]

    def forward(self, x: torch.Tensor, latent: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """Stores the index keys of the step's tokens and selects positions.

        Args:
            x: [T, hidden_size]: the layer's input.
            latent: [T, latent_size]: the query latent.
            angles: Of the step's tokens.
            step: The step, with metadata for the keys.

        Returns:
            As `AttentionBackend.select`.
        """
        query = self.wq_b(latent).unflatten(-1, (-1, self._head_dim))
        key = self.k_norm(self.wk(x)).unsqueeze(1)
        query, key = self._rotary[0](angles, query, key)
        weights = self.weights_proj(x.float()) * self._weight_scale
        return self.keys.select(query, key, weights, step)
