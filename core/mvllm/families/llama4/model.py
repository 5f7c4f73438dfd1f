"""Llama 4, the language model: attention in chunks with rotary embedding, or over everything without, and experts.

A query of a local layer sees the keys of its own chunk of `attention_chunk_size` positions (attention/chunks.py).
Global layers have no positional encoding; their queries have a factor that grows with the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.errors import ModelError
from mvllm.families.llama4.moe import Llama4MoE
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import QKVLinear, RowParallelLinear
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.norm import UnitRMSNorm
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.layers.rotary_attention import RotaryAttention
from mvllm.layers.stacked_moe import StackedMoE
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions, norm_eps
from mvllm.models.moe_config import check_activation
from mvllm.models.text_part import TextPart

_THETA = 500_000.0


@dataclass(frozen=True)
class LayerKinds:
    """What each layer is.

    Attributes:
        is_local: Whether it has a rotary embedding and, where the config says so, attention in chunks.
        chunks: Tokens per chunk, or None for attention over everything.
        has_experts: Whether it has experts.
    """

    is_local: tuple[bool, ...]
    chunks: tuple[int | None, ...]
    has_experts: tuple[bool, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> LayerKinds:
        """Reads `no_rope_layers`, `layer_types` and `moe_layers`, or the intervals that replace them.

        Raises:
            ModelError: One of them does not fit the model.
        """
        hf, count = config.hf_config, config.num_layers
        interval = hf.positive_int("no_rope_layer_interval", 4)
        is_local = hf.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
        _check_list(hf, "no_rope_layers", is_local, count, (0, 1))
        kinds = ("full_attention", "chunked_attention")
        types = hf.get("layer_types") or [kinds[local] for local in is_local[:count]]
        _check_list(hf, "layer_types", types, count, kinds)
        chunk = hf.positive_int("attention_chunk_size", 8192) if hf.get("attention_chunk_size", 8192) else None
        step = hf.positive_int("interleave_moe_layer_step", 1)
        with_experts = hf.get("moe_layers")
        with_experts = list(range(step - 1, count, step)) if with_experts is None else with_experts
        if not isinstance(with_experts, list) or not all(isinstance(layer, int) for layer in with_experts):
            raise ModelError(f"{hf.source}: 'moe_layers' should be a list of layer numbers, found {with_experts!r}.")
        return cls(
            tuple(bool(local) for local in is_local[:count]),
            # One chunk holds every sequence.
            tuple(
                chunk if kind == "chunked_attention" and chunk is not None and chunk < config.max_model_len else None
                for kind in types[:count]
            ),
            tuple(layer in with_experts for layer in range(count)),
        )


class QueryTemperature(nn.Module):
    """The factor on queries of layers without positional encoding, which grows with the position.

    Multiplies the queries of position p by 1 + scale · ln(1 + floor((p + 1) / floor_scale)). All layers share it.
    Source: Scalable-Softmax, arXiv:2501.19399.

    Args:
        ctx: Build context.
        scale, floor_scale: As above.
        max_len: Upper bound of positions.
    """

    def __init__(self, ctx: BuildContext, scale: float, floor_scale: float, max_len: int) -> None:
        super().__init__()
        self._scale, self._floor_scale, self._max_len = scale, floor_scale, max_len
        self._device = ctx.device
        # In float32, as in the reference implementation: rounded factors would be equal at many positions.
        self._lookup = ctx.floats(torch.float32).op("embedding", num_embeddings=max_len, embedding_dim=1).function

    def forward(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [T, heads, head_size] times the factors of positions [T]."""
        factors: torch.Tensor = self._lookup(positions, self._table)
        return (query.float() * factors.unsqueeze(2)).to(query.dtype)

    def prepare_weights(self) -> None:
        """Allocates the table, after the weights have been loaded."""
        self._table  # noqa: B018  (cached)

    # Not a buffer: casting a module's dtype must not touch the table.
    @cached_property
    def _table(self) -> torch.Tensor:
        """[max_len, 1] float32: the factor of each position."""
        steps = torch.floor((torch.arange(self._max_len).float() + 1.0) / self._floor_scale)
        return (torch.log1p(steps) * self._scale + 1.0).unsqueeze(1).to(self._device)


class Llama4Attention(nn.Module):
    """Self-attention of a local or a global layer.

    Args:
        config, ctx, options: As for models.
        layer: The layer's number.
        rotary: The rotary embedding; None for a global layer.
        chunk: Tokens per chunk, or None.
        temperature: The factor on queries of a global layer, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        options: LlamaOptions,
        layer: int,
        *,
        rotary: RotaryEmbedding | None = None,
        chunk: int | None = None,
        temperature: QueryTemperature | None = None,
    ) -> None:
        super().__init__()
        name, heads, size = f"model.layers.{layer}.self_attn", config.num_heads, config.head_size
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        hidden_size, bias = config.hidden_size, options.qkv_bias
        self.qkv = QKVLinear(ctx, names, hidden_size, heads, config.num_kv_heads, size, bias=bias)
        self.output = RowParallelLinear(ctx, f"{name}.o_proj", heads * size, hidden_size, bias=options.output_bias)
        # Before instead of after the rotation, which does not change a head's length.
        has_norm = rotary is not None and bool(config.hf_config.get("use_qk_norm", True))
        self.qk_norm = UnitRMSNorm(ctx, size, norm_eps(config, options)) if has_norm else None
        self.attention = Attention(ctx, self.qkv.heads, size, size**-0.5, chunk_size=chunk)
        is_ordered = (
            rotary is not None and rotary.host_order is not None and self.qkv.reorder_heads(ctx, rotary.host_order)
        )
        self._rotary_attention = RotaryAttention(
            self.attention, rotary, self.qk_norm, self.qk_norm, is_ordered=is_ordered
        )
        self.temperature = temperature

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(x)
        if self.temperature is not None:
            query = self.temperature(query, angles.index)
        return self.output(self._rotary_attention(angles, query, key, value, step))


class Llama4ForCausalLM(LlamaForCausalLM):
    """`Llama4ForCausalLM` of Hugging Face checkpoints, and of GGUF files (`stacked_experts` is false then)."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        self._kinds = LayerKinds.of(config)
        self._temperatures: list[QueryTemperature] = []  # one for all layers, which register it
        super().__init__(config, ctx)

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The attention has biases on all its projections or on none."""
        hf = config.hf_config
        bias = bool(hf.get("attention_bias", False))
        rope = RopeParameters.from_config(hf, config.head_size, theta=_THETA)
        if rope.depends_on_length(config.max_model_len):
            # Global layers read positions from the rows of the rotary table.
            raise ModelError(f"{hf.source}: the RoPE scaling {rope.rope_type!r} is not supported in this family.")
        return LlamaOptions(
            qkv_bias=bias,
            output_bias=bias,
            eps=hf.positive_number("rms_norm_eps", 1e-5),
            rope=rope,
            interleaved_rotary=True,
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        chunk = self._kinds.chunks[layer]
        if self._kinds.is_local[layer]:
            return Llama4Attention(self.config, ctx, options, layer, rotary=rotary, chunk=chunk)
        hf, length = self.config.hf_config, self.config.max_model_len
        floor_scale = hf.positive_int("floor_scale", 8192)
        # The factor of positions below floor_scale - 1 is 1.
        if hf.get("attn_temperature_tuning", True) and length >= floor_scale and not self._temperatures:
            scale = hf.positive_number("attn_scale", 0.1)
            self._temperatures.append(QueryTemperature(ctx, scale, floor_scale, length))
        temperature = self._temperatures[0] if self._temperatures else None
        return Llama4Attention(self.config, ctx, options, layer, chunk=chunk, temperature=temperature)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.feed_forward", self.config.hidden_size
        check_activation(hf)
        if not self._kinds.has_experts[layer]:
            size = hf.positive_int("intermediate_size_mlp", 16384)
            return GatedMLP(ctx, name, hidden_size, size, "silu", bias=False)
        size, count = hf.positive_int("intermediate_size", 8192), hf.positive_int("num_local_experts", 16)
        is_stacked = hf.get("stacked_experts", ctx.quantization is None or ctx.quantization.quantizes_on_load)
        experts = StackedMoE(
            ctx,
            f"{name}.experts",
            hidden_size,
            size,
            num_experts=count,
            top_k=1,
            transposed=True,
            is_stacked=bool(is_stacked),
        )
        shared = GatedMLP(ctx, f"{name}.shared_expert", hidden_size, size, "silu", bias=False)
        return Llama4MoE(ctx, f"{name}.router", experts, shared, hf.positive_int("num_experts_per_tok", 1))


class Llama4ForConditionalGeneration(TextPart, Llama4ForCausalLM):
    """The language model of `Llama4ForConditionalGeneration` checkpoints. Images as input are not supported."""


def _check_list(hf: HFConfig, key: str, found: object, count: int, allowed: tuple[Any, ...]) -> None:
    if not isinstance(found, list) or len(found) < count or any(value not in allowed for value in found):
        raise ModelError(
            f"{hf.source}: {key!r} should have one of {', '.join(map(repr, allowed))} for each of the {count} layers, "
            f"found {found!r}."
        )
