"""Falcon-H1: Llama with attention and Mamba-2 in parallel in each layer, and factors on most intermediate results."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.activation import activation
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from mvllm.layers.mamba2_mixer import Mamba2Mixer
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions
from mvllm.models.mamba_hybrid import mamba2_config
from mvllm.models.module_names import ModuleNames


class FalconH1ForCausalLM(LlamaForCausalLM):
    """`FalconH1ForCausalLM` of Hugging Face checkpoints."""

    module_names = ModuleNames({"model.final_layernorm": "model.norm"})

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Llama's options with other names of norms and factors on embeddings, keys and logits."""
        hf = config.hf_config
        return replace(
            super().options(config),
            norms=LayerNorms(before_mlp="pre_ff_layernorm"),
            eps=hf.positive_number("rms_norm_eps", 1e-5),
            embedding_scale=hf.positive_number("embedding_multiplier", 1.0),
            # A factor on keys is a factor on scores.
            attention_scale=config.head_size**-0.5 * hf.positive_number("key_multiplier", 1.0),
            logits_scale=1.0 / hf.positive_number("lm_head_multiplier", 1.0),
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        return ParallelMixers(self.config, ctx, super().build_attention(ctx, options, rotary, layer), layer)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        return ScaledGatedMLP(self.config, ctx, f"model.layers.{layer}.feed_forward", bias=options.mlp_bias)


class ParallelMixers(nn.Module):
    """The sum of attention and a Mamba-2 layer over the same input.

    Args:
        config, ctx: As for models.
        attention: The attention; `forward` as in LlamaAttention.
        layer: Number of the layer.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext, attention: nn.Module, layer: int) -> None:
        super().__init__()
        hf = config.hf_config
        mamba = mamba2_config(
            config,
            norm=bool(hf.get("mamba_rms_norm", False)),
            norm_before_gate=bool(hf.get("mamba_norm_before_gate", True)),
        )
        factors = _factors(hf, "ssm_multipliers", 5)
        mamba = replace(mamba, out_bias=bool(hf.get("projectors_bias", False)), multipliers=factors)
        self.attention = attention
        self.mamba = Mamba2Mixer(ctx, f"model.layers.{layer}.mamba", mamba)
        self._attention_in = hf.positive_number("attention_in_multiplier", 1.0)
        self._attention_out = hf.positive_number("attention_out_multiplier", 1.0)
        self._mamba_in = hf.positive_number("ssm_in_multiplier", 1.0)
        self._mamba_out = hf.positive_number("ssm_out_multiplier", 1.0)

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        mamba = _scaled(self.mamba(_scaled(x, self._mamba_in), angles, step), self._mamba_out)
        attention = self.attention(_scaled(x, self._attention_in), angles, step)
        return mamba + _scaled(attention, self._attention_out)


class ScaledGatedMLP(nn.Module):
    """Gated feed-forward block with factors on the gate and on the result.

    Args:
        config, ctx: As for models.
        name: The checkpoint module.
        bias: Whether the linear layers have biases.
    """

    def __init__(self, config: ModelConfig, ctx: BuildContext, name: str, *, bias: bool) -> None:
        super().__init__()
        hf, hidden_size = config.hf_config, config.hidden_size
        size = hf.positive_int("intermediate_size")
        bands = [(f"{name}.gate_proj", size), (f"{name}.up_proj", size)]
        self.gate_up = ColumnParallelLinear(ctx, bands, hidden_size, bias=bias)
        self.down = RowParallelLinear(ctx, f"{name}.down_proj", size, hidden_size, bias=bias)
        self._act = activation(ctx, hf.get("hidden_act", "silu"), self.gate_up.out_features // 2)
        self._gate_factor, self._down_factor = _factors(hf, "mlp_multipliers", 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return _scaled(self.down(self._act(_scaled(gate, self._gate_factor)) * up), self._down_factor)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


def _factors(hf: HFConfig, key: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers of config.json; ones if it is absent."""
    found = hf.get(key, [1.0] * count)
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, int | float) for each in found):
        raise ModelError(f"{hf.source}: {key!r} should be a list of {count} numbers, found {found!r}.")
    return tuple(float(each) for each in found)
