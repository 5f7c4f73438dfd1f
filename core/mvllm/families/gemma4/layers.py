"""Layers of Gemma 4: attention with normalised values and shared caches, and the per-layer inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.layers.activation import activation
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.embedding import VocabEmbedding
from mvllm.layers.linear import ColumnParallelLinear, HeadShard, QKVLinear, ReplicatedLinear, RowParallelLinear
from mvllm.layers.norm import RMSNorm, UnitRMSNorm
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.layers.rotary_attention import RotaryAttention
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target
from mvllm.models.llama import LlamaOptions, norm_eps


class Gemma4Attention(nn.Module):
    """Self-attention with norms on queries, keys and values.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        config, options: Of the model.
        rotary: The rotary embedding.
        head_size, num_kv_heads, window: Of this layer.
        keys_are_values: Values are the projected keys, before norm and rotary embedding.
        shares: The attention whose keys and values this layer attends to; None if it has its own.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        config: ModelConfig,
        options: LlamaOptions,
        rotary: RotaryEmbedding,
        *,
        head_size: int,
        num_kv_heads: int,
        window: int | None,
        keys_are_values: bool,
        shares: Gemma4Attention | None,
    ) -> None:
        super().__init__()
        hidden_size, eps, heads = config.hidden_size, norm_eps(config, options), config.num_heads
        self._head_size = head_size
        self.q_norm = RMSNorm(ctx, f"{name}.q_norm", head_size, eps)
        self.output = RowParallelLinear(ctx, f"{name}.o_proj", heads * head_size, hidden_size, bias=options.output_bias)
        self.qkv: QKVLinear | None = None
        self.query: ColumnParallelLinear | None = None
        # In tuples, so that modules of other layers are not registered as this layer's.
        self._rotary = (rotary,)
        self._shares: tuple[Gemma4Attention, ...] = () if shares is None else (shares,)
        if shares is not None:
            rows = [(f"{name}.q_proj", heads * head_size)]
            HeadShard.for_shards(heads, num_kv_heads, ctx.shares)  # checks that ranks divide the heads
            self.query = ColumnParallelLinear(ctx, rows, hidden_size, bias=options.qkv_bias)
            return
        values = f"{name}.k_proj" if keys_are_values else f"{name}.v_proj"
        names = (f"{name}.q_proj", f"{name}.k_proj", values)
        self.qkv = QKVLinear(ctx, names, hidden_size, heads, num_kv_heads, head_size, bias=options.qkv_bias)
        self.k_norm = RMSNorm(ctx, f"{name}.k_norm", head_size, eps)
        self.v_norm = UnitRMSNorm(ctx, head_size, eps)
        # Images attend in both directions in the layers with a window only.
        has_spans = config.has_non_causal_spans and window is not None
        self.attention = Attention(
            ctx, self.qkv.heads, head_size, 1.0, sliding_window=window, non_causal_spans=has_spans
        )
        self._rotary_attention = RotaryAttention(self.attention, rotary, self.q_norm, self.k_norm)

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        if self.qkv is None:
            return self.output(self._attend_to_shared(x, angles, step))
        query, key, value = self.qkv.split(x)
        return self.output(self._rotary_attention(angles, query, key, self.v_norm(value), step))

    def _attend_to_shared(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        assert self.query is not None, "a layer without keys and values has queries"
        query = self.q_norm(self.query(x).view(x.shape[0], -1, self._head_size))
        # The operation rotates keys, too. These are nobody's.
        query, _ = self._rotary[0](angles, query, query.new_empty(x.shape[0], 1, self._head_size))
        attention = self._shares[0].attention
        if attention.kv_cache is None:
            return query.new_zeros(query.shape[0], query.shape[1] * self._head_size)
        return attention.attend(query, step.metadata[attention.metadata_key])


class PerLayerEmbedding(nn.Module):
    """The input of each layer beside the residual stream, from the tokens and their embeddings.

    Args:
        ctx: Build context.
        config: The model.
        size: Elements for each layer.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, size: int) -> None:
        super().__init__()
        hf, hidden_size, total = config.hf_config, config.hidden_size, config.num_layers * size
        vocab_size = hf.positive_int("vocab_size_per_layer_input", 262_144)
        self.embedding = VocabEmbedding(ctx, "model.embed_tokens_per_layer", vocab_size, total)
        self.projection = ReplicatedLinear(ctx, "model.per_layer_model_projection", hidden_size, total, bias=False)
        eps = hf.positive_number("rms_norm_eps", 1e-6)
        self.norm = RMSNorm(ctx, "model.per_layer_projection_norm", size, eps)
        self._size, self._projection_scale = size, hidden_size**-0.5
        self._embedding_scale = torch.tensor(size**0.5, dtype=ctx.dtype).item()

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Token ids [T] and their scaled embeddings [T, hidden_size] to [T, layers, size]."""
        shape = (input_ids.shape[0], -1, self._size)
        projected = self.norm((self.projection(embedded) * self._projection_scale).view(shape))
        of_tokens = (self.embedding(input_ids) * self._embedding_scale).view(shape)
        return (projected + of_tokens) * 2.0**-0.5


class PerLayerBlock(nn.Module):
    """The block that adds the per-layer input of one layer.

    Args:
        ctx: Build context.
        name: The checkpoint module of the layer.
        hidden_size, size: Elements of the residual stream, and of the input.
        act: The activation of the gate.
        eps: Of the norm.
    """

    def __init__(self, ctx: BuildContext, name: str, hidden_size: int, size: int, act: str, eps: float) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(ctx, f"{name}.per_layer_input_gate", hidden_size, size, bias=False)
        self.projection = ReplicatedLinear(ctx, f"{name}.per_layer_projection", size, hidden_size, bias=False)
        self.norm = RMSNorm(ctx, f"{name}.post_per_layer_input_norm", hidden_size, eps)
        self._act = activation(ctx, act, size)

    def forward(self, x: torch.Tensor, per_layer_input: torch.Tensor) -> torch.Tensor:
        """Residual stream [T, hidden_size] and the input [T, size] to the summand, [T, hidden_size]."""
        return self.norm(self.projection(self._act(self.gate(x)) * per_layer_input))


class LayerScalar(nn.Module):
    """A factor in the checkpoint.

    Args:
        ctx: Build context.
        name: The checkpoint tensor, of one element.

    Attributes:
        factor: Its value, after loading.
    """

    def __init__(self, ctx: BuildContext, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = ctx.parameter(1)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x times the factor."""
        return x if self.factor == 1.0 else x * self.factor

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The checkpoint tensor and its target on this rank."""
        yield whole_tensor_target(self.name, self.weight)

    def prepare_weights(self) -> None:
        """Reads the value, so that a step multiplies by a number."""
        self.factor = float(self.weight)
