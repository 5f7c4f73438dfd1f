"""Mamba-2: layers of one Mamba-2 mixer each, with a norm before it; no attention."""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.mamba2_mixer import Mamba2Config, Mamba2Mixer
from mvllm.layers.norm import RMSNorm
from mvllm.models.causal_lm import CausalLM, layer_norm_epsilon
from mvllm.models.mamba_hybrid import time_step_limit


class Mamba2Layer(nn.Module):
    """A norm and a Mamba-2 mixer on a residual stream."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()
        name = f"backbone.layers.{layer}"
        self.norm = RMSNorm(ctx, f"{name}.norm", config.hidden_size, layer_norm_epsilon(config))
        self.mixer = Mamba2Mixer(ctx, f"{name}.mixer", mixer_config(config))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns the last mixer's output and the residual stream without that output."""
        x, residual = self.norm.add_norm(x, residual)
        return self.mixer(x, step), residual


class Mamba2ForCausalLM(CausalLM):
    """`Mamba2ForCausalLM` of Hugging Face checkpoints."""

    layer_names = re.compile(r"backbone\.layers\.(\d+)\.")
    first_stage_names = ("backbone.embeddings.",)
    last_stage_names = ("backbone.norm_f.",)

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        name, size = "backbone.embeddings", config.hidden_size
        self.embeddings = self._build_embedding(ctx, name, size)
        self.layers = nn.ModuleList(Mamba2Layer(config, ctx, layer) for layer in self._layer_numbers())
        eps = layer_norm_epsilon(config)
        self.norm_f = RMSNorm(ctx, "backbone.norm_f", size, eps) if self.stage.is_last else None
        self.lm_head = self._build_head(ctx, name, size, self.embeddings)

    def model_name(self, name: str) -> str:
        return name.replace("backbone.embedding.", "backbone.embeddings.")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate if self.embeddings is None else self.merge_items(self.embeddings(input_ids), step)
        assert x is not None, "every pipeline stage but the first needs `intermediate`"
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        if self.norm_f is None:
            return x if residual is None else residual + x
        return self.norm_f.add_norm(x, residual)[0]


def mixer_config(config: ModelConfig) -> Mamba2Config:
    """Sizes and options of the layers, from config.json.

    Raises:
        ModelError: A key is missing or invalid.
    """
    hf = config.hf_config
    num_heads, head_size = hf.positive_int("num_heads"), hf.positive_int("head_dim")
    inner = hf.positive_int("expand", 2) * config.hidden_size
    if num_heads * head_size != inner:
        raise ModelError(
            f"{hf.source}: {num_heads} heads of {head_size} elements ('num_heads', 'head_dim') are not the inner size "
            f"of a layer, {inner} ('expand' times 'hidden_size')."
        )
    bias = bool(hf.get("use_bias", False))
    return Mamba2Config(
        hidden_size=config.hidden_size,
        num_heads=num_heads,
        head_size=head_size,
        num_groups=hf.positive_int("n_groups", 8),
        state_size=hf.positive_int("state_size", 128),
        conv_kernel=hf.positive_int("conv_kernel", 4),
        conv_bias=bool(hf.get("use_conv_bias", True)),
        in_bias=bias,
        out_bias=bias,
        activation=hf.get("hidden_act", "silu"),
        eps=layer_norm_epsilon(config),
        dt_limit=time_step_limit(hf),
    )
