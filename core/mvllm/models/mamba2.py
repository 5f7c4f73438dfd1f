"""Mamba-2: layers of one Mamba-2 mixer each, with a norm before it; no attention."""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.mamba2_mixer import Mamba2Config, Mamba2Mixer
from mvllm.layers.norm import RMSNorm
from mvllm.models.causal_lm import CausalLM, layer_norm_epsilon
from mvllm.models.mamba_hybrid import time_step_limit


class SingleBlockLayer(nn.Module):
    """A norm and one block, such as a Mamba-2 mixer, on a residual stream.

    Args:
        norm: The norm before the block.
        mixer: The block.
        reads_step: Whether the block takes the step: attention and layers with a state do.
    """

    def __init__(self, norm: RMSNorm, mixer: nn.Module, *, reads_step: bool = True) -> None:
        super().__init__()
        self.norm, self.mixer, self._reads_step = norm, mixer, reads_step

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns the last block's output and the residual stream without that output."""
        x, residual = self.norm.add_norm(x, residual)
        return self.mixer(x, None, step) if self._reads_step else self.mixer(x), residual


class Mamba2ForCausalLM(CausalLM):
    """`Mamba2ForCausalLM` of Hugging Face checkpoints. Subclasses have other blocks.

    Attributes:
        root: The module that holds the embeddings, layers and last norm.
    """

    keeps_layers = True
    root: ClassVar[str] = "backbone"
    layer_names = re.compile(r"backbone\.layers\.(\d+)\.")
    first_stage_names = ("backbone.embeddings.",)
    last_stage_names = ("backbone.norm_f.",)

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        name, size, eps = f"{self.root}.embeddings", config.hidden_size, self.norm_eps()
        self.embeddings = self._build_embedding(ctx, name, size)
        self.layers = nn.ModuleList(
            self.build_layer(ctx, f"{self.root}.layers.{layer}", layer) for layer in self._layer_numbers()
        )
        self.norm = RMSNorm(ctx, f"{self.root}.norm_f", size, eps) if self.stage.is_last else None
        self.lm_head = self._build_head(ctx, name, size, self.embeddings)

    def norm_eps(self) -> float:
        """Epsilon of the norms."""
        return layer_norm_epsilon(self.config)

    def build_layer(self, ctx: BuildContext, name: str, layer: int) -> SingleBlockLayer:
        """The layer of a number; `name` is its checkpoint module."""
        norm = RMSNorm(ctx, f"{name}.norm", self.config.hidden_size, self.norm_eps())
        return SingleBlockLayer(norm, Mamba2Mixer(ctx, f"{name}.mixer", mixer_config(self.config)))

    def model_name(self, name: str) -> str:
        return super().model_name(name).replace("backbone.embedding.", "backbone.embeddings.")

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
        for number, layer in zip(self._layer_numbers(), self.layers, strict=True):
            if number in step.kept_layers:
                step.kept_states.append(x.clone() if residual is None else residual + x)
            x, residual = layer(x, residual, step)
        if self.norm is None:
            return x if residual is None else residual + x
        return self.norm.add_norm(x, residual)[0]


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
