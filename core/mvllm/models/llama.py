"""Llama 2 and 3, and the common ground of the families that descend from it (Mistral, Qwen2, Qwen3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.layers.attention import Attention, Sinks
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import QKVLinear, RowParallelLinear
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.norm import RMSNorm
from mvllm.layers.rotary import RotaryEmbedding, StepAngles
from mvllm.models.causal_lm import CausalLM

AttentionMaker = Callable[[ModelConfig, BuildContext, RotaryEmbedding, int], nn.Module]
"""Of the number of a layer; what it makes is called as LlamaAttention is."""

MLPMaker = Callable[[ModelConfig, BuildContext, int], nn.Module]
"""Likewise; what it makes takes [T, hidden_size] to [T, hidden_size]."""


@dataclass(frozen=True)
class LlamaOptions:
    """In what the families differ.

    Attributes:
        qkv_bias, output_bias, mlp_bias: Which linear layers have biases.
        qk_norm: Queries and keys are normalised per head before they are rotated.
        windows: Sliding window of each layer, or None.
        sinks: Each query head has a learned extra logit.
        attention: Makes a layer's attention where that is not LlamaAttention; takes what `LatentAttention` needs.
        mlp: Makes a layer's feed-forward block where that is not a GatedMLP.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    attention: AttentionMaker | None = None
    mlp: MLPMaker | None = None


class LlamaAttention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        options: LlamaOptions,
        rotary: RotaryEmbedding,
        layer: int,
    ) -> None:
        super().__init__()
        name = f"model.layers.{layer}.self_attn"
        hidden_size, head_size, eps = config.hidden_size, config.head_size, _rms_norm_eps(config)
        self.qkv = QKVLinear(
            ctx,
            (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
            hidden_size,
            config.num_heads,
            config.num_kv_heads,
            head_size,
            bias=options.qkv_bias,
        )
        self.output = RowParallelLinear(
            ctx, f"{name}.o_proj", config.num_heads * head_size, hidden_size, bias=options.output_bias
        )
        self.q_norm = RMSNorm(ctx, f"{name}.q_norm", head_size, eps) if options.qk_norm else None
        self.k_norm = RMSNorm(ctx, f"{name}.k_norm", head_size, eps) if options.qk_norm else None
        heads = self.qkv.heads
        self.sinks = Sinks(ctx, f"{name}.sinks", config.num_heads, heads) if options.sinks else None
        self.attention = Attention(
            ctx,
            heads,
            head_size,
            head_size**-0.5,
            sliding_window=options.windows[layer],
            sinks=None if self.sinks is None else self.sinks.weight,
        )
        self._rotary = [rotary]  # in a list: it belongs to the model, not to every layer

    def forward(self, x: torch.Tensor, angles: StepAngles, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(x)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self._rotary[0](angles, query, key)
        return self.output(self.attention(query, key, value, step))


class LlamaLayer(nn.Module):
    """Attention and MLP, each behind a norm, on a residual stream."""

    def __init__(
        self, config: ModelConfig, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> None:
        super().__init__()
        name, eps = f"model.layers.{layer}", _rms_norm_eps(config)
        self.input_norm = RMSNorm(ctx, f"{name}.input_layernorm", config.hidden_size, eps)
        self.attention = (
            LlamaAttention(config, ctx, options, rotary, layer)
            if options.attention is None
            else options.attention(config, ctx, rotary, layer)
        )
        self.mlp_norm = RMSNorm(ctx, f"{name}.post_attention_layernorm", config.hidden_size, eps)
        self.mlp = (
            dense_mlp(config, ctx, f"{name}.mlp", bias=options.mlp_bias)
            if options.mlp is None
            else options.mlp(config, ctx, layer)
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: StepAngles, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns the last block's output and the residual stream before it was added."""
        x, residual = self.input_norm.add_norm(x, residual)
        x = self.attention(x, angles, step)
        x, residual = self.mlp_norm.add_norm(x, residual)
        return self.mlp(x), residual


class LlamaForCausalLM(CausalLM):
    """`LlamaForCausalLM` of Hugging Face checkpoints."""

    first_stage_names = ("model.embed_tokens.",)
    last_stage_names = ("model.norm.",)

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        options = self.options(config)
        self.rotary = RotaryEmbedding(
            ctx, RopeParameters.of(config.hf_config, config.head_size), max_len=config.max_model_len
        )
        self.uses_prompt_lens = self.rotary.uses_prompt_lens
        self.embed_tokens = self._build_embedding(ctx, "model.embed_tokens", config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaLayer(config, ctx, options, self.rotary, layer) for layer in self._layer_numbers()
        )
        self.norm = (
            RMSNorm(ctx, "model.norm", config.hidden_size, _rms_norm_eps(config)) if self.stage.is_last else None
        )
        self.lm_head = self._build_head(ctx, "model.embed_tokens", config.hidden_size, self.embed_tokens)

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """What this family's layers look like."""
        attention_bias = bool(config.hf_config.get("attention_bias", False))
        return LlamaOptions(
            windows=(None,) * config.num_layers,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.hf_config.get("mlp_bias", False)),
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate if self.embed_tokens is None else self.embed_tokens(input_ids)
        assert x is not None, "every stage but the first needs the result of the one before"
        angles = self.rotary.angles(positions, step.prompt_lens)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, angles, step)
        assert residual is not None
        return x + residual if self.norm is None else self.norm.add_norm(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None, "only the last stage makes logits"
        return self.lm_head(hidden)


def dense_mlp(
    config: ModelConfig, ctx: BuildContext, name: str, intermediate_size: int | None = None, *, bias: bool = False
) -> GatedMLP:
    """The feed-forward block that every token passes; of the model's `intermediate_size` unless another is given."""
    hf = config.hf_config
    size = hf.positive_int("intermediate_size") if intermediate_size is None else intermediate_size
    return GatedMLP(ctx, name, config.hidden_size, size, hf.get("hidden_act", "silu"), bias=bias)


def _rms_norm_eps(config: ModelConfig) -> float:
    return config.hf_config.positive_number("rms_norm_eps", 1e-6)
