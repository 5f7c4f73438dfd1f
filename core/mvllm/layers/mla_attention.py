"""Multi-head latent attention (MLA): keys and values of all heads derive from one latent vector per token.

    x ─ kv_a ─┬─ norm ─> latent [rank] ──────┐                 key of head h    = [Kₕ · latent | rotated]
              └─ rotate ─> rotated [rope] ───┴─ the cache      value of head h  = Vₕ · latent
    x ─ q ────┬─ Kₕᵀ · plain ─> [rank] ──────┐
              └─ rotate ─> [rope] ───────────┴─ query

Only the latent and the rotated part of the key are cached. A score (plain · Kₕ latent + rotated parts) equals
(Kₕᵀ plain) · latent + ..., so queries are projected into the latent space (*absorbed*) and attend to the cache
directly: one key/value head of rank + rope elements, whose first `rank` elements are also the value. The result is a
latent for each head, which Vₕ projects to the head's output.

Tensor parallelism shards the heads; every rank caches the whole latent.

With sparse attention (DeepSeek-V3.2), an indexer selects for each query the tokens whose latents it attends to.

Sources: DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError, ModelError
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.fused_moe import quantization_of_layout
from mvllm.layers.linear import ColumnParallelLinear, HeadShard, Linear, ReplicatedLinear, RowParallelLinear
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.norm import RMSNorm
from mvllm.layers.quantization.rtn_matrix import float_targets
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.layers.sparse_indexer import SparseConfig, SparseIndexer
from mvllm.layers.weight_target import WeightTarget

_NORM_EPS = 1e-6  # of the norms on latents; independent of rms_norm_eps


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of MLA.

    Attributes:
        hidden_size, num_heads: Sizes of the whole model.
        q_lora_rank: Size of the query latent; None if queries are projected from the input directly.
        kv_lora_rank: Size of the key/value latent.
        qk_nope_head_dim, qk_rope_head_dim: Elements of a query or key head without and with rotary embedding.
        v_head_dim: Elements of a value head.
        bias: Whether the projections to latents and the output projection have biases.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool

    @classmethod
    def from_config(cls, config: ModelConfig) -> MLAConfig:
        """The sizes in config.json.

        Raises:
            ModelError: A key is missing or invalid.
        """
        hf = config.hf_config
        return cls(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            q_lora_rank=hf.positive_int("q_lora_rank") if "q_lora_rank" in hf else None,
            kv_lora_rank=hf.positive_int("kv_lora_rank"),
            qk_nope_head_dim=hf.positive_int("qk_nope_head_dim"),
            qk_rope_head_dim=hf.positive_int("qk_rope_head_dim"),
            v_head_dim=hf.positive_int("v_head_dim"),
            bias=bool(hf.get("attention_bias", False)),
        )


class MLAAttention(nn.Module):
    """Self-attention over latents.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        shape: Its sizes.
        rotary: Rotary embedding of `qk_rope_head_dim` elements; None leaves them as they are (NoPE).
        sparse: Sparse attention, which needs a query latent and a rotary embedding; None attends to all tokens.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        shape: MLAConfig,
        rotary: RotaryEmbedding | None,
        sparse: SparseConfig | None = None,
    ) -> None:
        super().__init__()
        ctx.refuse_batch_invariance("Multi-head latent attention (MLA)")
        self.shape = shape
        share = HeadShard.for_shards(shape.num_heads, shape.num_heads, ctx.shares)
        heads = HeadShard(share.num_heads, 1, share.first_head, 0)
        query_size = shape.num_heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        hidden_size, bias = shape.hidden_size, shape.bias
        key_size = shape.kv_lora_rank + shape.qk_rope_head_dim
        self.q_a_layernorm = None
        self.latents = _Latents(ctx, name, shape)
        query_name, query_input = f"{name}.q_proj", hidden_size
        if shape.q_lora_rank is not None:
            self.q_a_layernorm = RMSNorm(ctx, f"{name}.q_a_layernorm", shape.q_lora_rank, _NORM_EPS)
            query_name, query_input = f"{name}.q_b_proj", shape.q_lora_rank
        self.q_b_proj = ColumnParallelLinear(ctx, [(query_name, query_size)], query_input, bias=False)
        self.kv_a_layernorm = RMSNorm(ctx, f"{name}.kv_a_layernorm", shape.kv_lora_rank, _NORM_EPS)
        self.kv_b_proj = _KVBProjection(ctx, f"{name}.kv_b_proj", shape, heads)
        self.attention = Attention(
            ctx,
            heads,
            key_size,
            _scale(shape, rotary),
            latent_size=shape.kv_lora_rank,
            index_topk=None if sparse is None else sparse.top_k,
        )
        self.indexer = None
        if sparse is not None and not sparse.is_shared:
            assert shape.q_lora_rank is not None and rotary is not None, "an indexer reads the query latent"
            self.indexer = SparseIndexer(ctx, f"{name}.indexer", hidden_size, shape.q_lora_rank, sparse, rotary)
        self.o_proj = RowParallelLinear(
            ctx, f"{name}.o_proj", shape.num_heads * shape.v_head_dim, hidden_size, bias=bias
        )
        self._rotary = [rotary]  # in a list, so that it is not registered as a submodule of every layer
        order = None if rotary is None else rotary.host_order
        self._is_ordered = order is not None and self._reorder(ctx, order, heads)

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        shape = self.shape
        query_latent, latent, key_rotated = self.latents(x)
        query_input = x
        if query_latent is not None and self.q_a_layernorm is not None:
            query_input = self.q_a_layernorm(query_latent)
        query = self.q_b_proj(query_input).unflatten(-1, (-1, shape.qk_nope_head_dim + shape.qk_rope_head_dim))
        if angles.query_scale is not None:
            query = query * angles.query_scale
        plain, rotated = query.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), dim=-1)
        latent, key_rotated = self.kv_a_layernorm(latent).unsqueeze(1), key_rotated.unsqueeze(1)
        if (rotary := self._rotary[0]) is not None:
            rotated, key_rotated = rotary(angles, rotated, key_rotated, is_ordered=self._is_ordered)
        key = torch.cat((latent, key_rotated), dim=-1)
        query = torch.cat((self.kv_b_proj.absorb(plain), rotated), dim=-1)
        if self.indexer is not None:
            step.selected_positions = self.indexer(x, query_input, angles, step)
        positions = None if self.attention.spec.index_topk is None else step.selected_positions
        found = self.attention(query, key, key[..., : shape.kv_lora_rank], step, positions)
        return self.o_proj(self.kv_b_proj.expand(found.unflatten(-1, (-1, shape.kv_lora_rank))))

    def _reorder(self, ctx: BuildContext, order: torch.Tensor, heads: HeadShard) -> bool:
        """Orders the rotated elements of queries and keys by the rows of their matrices; returns whether it is done."""
        shape = self.shape
        of_head = torch.cat((torch.arange(shape.qk_nope_head_dim), shape.qk_nope_head_dim + order))
        firsts = torch.arange(heads.num_heads).unsqueeze(1) * len(of_head)
        of_queries, product = (firsts + of_head).flatten(), self.latents.of_keys
        first = product.out_features - len(order)
        of_keys = torch.cat((torch.arange(first), first + order))
        if not (self.q_b_proj.can_reorder_rows(ctx, of_queries) and product.can_reorder_rows(ctx, of_keys)):
            return False
        self.q_b_proj.reorder_rows(of_queries)
        product.reorder_rows(of_keys)
        return True


class _Latents(nn.Module):
    """The input's projections to the latents of queries and of keys and values: one product, if they allow it.

    One product reads the input, and rounds it for quantized weights, once.

    Attributes:
        of_keys: The product whose last rows are the rotated part of the key.
    """

    def __init__(self, ctx: BuildContext, name: str, shape: MLAConfig) -> None:
        super().__init__()
        self._sizes: tuple[int, ...] = (shape.kv_lora_rank, shape.qk_rope_head_dim)
        keys = (f"{name}.kv_a_proj_with_mqa", sum(self._sizes))
        self.q_a_proj: Linear | None = None
        if shape.q_lora_rank is None:
            self.of_keys: Linear = ReplicatedLinear(ctx, keys[0], shape.hidden_size, keys[1], bias=shape.bias)
            return
        queries = (f"{name}.q_a_proj", shape.q_lora_rank)
        try:
            self.of_keys = _stacked(ctx, (queries, keys), shape)
            self._sizes = (shape.q_lora_rank, *self._sizes)
        except (ConfigError, ModelError):  # the checkpoint stores them in different formats
            self.q_a_proj, self.of_keys = (_stacked(ctx, (each,), shape) for each in (queries, keys))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """The latents of queries (None if they have none), of keys and values, and the rotated part of the key."""
        found = self.of_keys(x).split(self._sizes, dim=-1)
        if len(found) == 3:
            return found
        return None if self.q_a_proj is None else self.q_a_proj(x), *found


def _stacked(ctx: BuildContext, matrices: Sequence[tuple[str, int]], shape: MLAConfig) -> Linear:
    """One product of checkpoint matrices, given with their numbers of rows, that every rank holds."""
    parts, start = [], 0
    for name, num_rows in matrices:
        parts.append(Part(name, num_rows, slice(0, num_rows), slice(start, start + num_rows)))
        start += num_rows
    return Linear(ctx, parts, shape.hidden_size, bias=shape.bias)


class _KVBProjection(nn.Module):
    """K and V of this rank's heads, one checkpoint matrix with the rows of each head's K, then its V.

    Attributes:
        weight: [heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank].
    """

    partitions: Mapping[str, int] = {"weight": 0}

    def __init__(self, ctx: BuildContext, name: str, shape: MLAConfig, heads: HeadShard) -> None:
        super().__init__()
        size = shape.qk_nope_head_dim + shape.v_head_dim
        rows, num_rows = (
            slice(heads.first_head * size, (heads.first_head + heads.num_heads) * size),
            heads.num_heads * size,
        )
        part = Part(name, shape.num_heads * size, rows, slice(0, num_rows))
        self._layout = MatrixLayout((part,), shape.kv_lora_rank, slice(0, shape.kv_lora_rank), num_rows)
        self._sizes = (shape.qk_nope_head_dim, shape.v_head_dim)
        self.stored = quantization_of_layout(ctx, self._layout)
        weight = ctx.parameter(num_rows, shape.kv_lora_rank)
        self.weight: torch.Tensor = weight if self.stored is None else weight.data
        self._place = ctx.place
        sizes, heads_here, rank = self._sizes, heads.num_heads, shape.kv_lora_rank
        self._absorb = ctx.op("head_product", num_heads=heads_here, in_size=sizes[0], out_size=rank).function
        self._expand = ctx.op("head_product", num_heads=heads_here, in_size=rank, out_size=sizes[1]).function

    def absorb(self, plain: torch.Tensor) -> torch.Tensor:
        """Projects query heads [T, heads, qk_nope_head_dim] to the latent space, [T, heads, kv_lora_rank]."""
        return self._absorb(plain, self._of_heads()[0])

    def expand(self, latents: torch.Tensor) -> torch.Tensor:
        """Projects each head's latent [T, heads, kv_lora_rank] to its output, [T, heads · v_head_dim]."""
        return self._expand(latents, self._of_heads()[1].transpose(1, 2)).flatten(1)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        if isinstance(self.weight, nn.Parameter):
            yield from float_targets(self._layout, self.weight)
        elif self.stored is not None:
            yield from self.stored.targets()

    def prepare_weights(self) -> None:
        """Dequantizes the matrix if the checkpoint stores it quantized."""
        if self.stored is not None:
            self.weight.copy_(self.stored.dequantized(self.weight.shape[1], self.weight.dtype, self.weight.device))
            self.stored = None
            self.weight = self._place(self.weight, 0)

    def _of_heads(self) -> tuple[torch.Tensor, ...]:
        return self.weight.unflatten(0, (-1, sum(self._sizes))).split(self._sizes, dim=1)


def _scale(shape: MLAConfig, rotary: RotaryEmbedding | None) -> float:
    """1 / sqrt(head size), increased for RoPE scalings with `mscale_all_dim`."""
    scale = (shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5
    if rotary is None:
        return scale
    rope = rotary.rope
    weight, factor = rope.values.get("mscale_all_dim"), rope.values.get("factor")
    if rope.rope_type == "default" or not weight or not factor or factor <= 1:
        return scale
    return float(scale * (0.1 * weight * math.log(factor) + 1.0) ** 2)
