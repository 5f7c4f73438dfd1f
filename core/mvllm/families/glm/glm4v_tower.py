"""The vision tower of GLM-4V: RMS norms, gated MLPs, learned positions that are interpolated to the grid, and a
convolution over each square of patches before a gated merger."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.layers.activation import activation
from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import Embedding
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.norm import LayerNorm, RMSNorm
from mvllm.layers.patch_embedding import PatchEmbedding
from mvllm.models.vision.encoder_layers import EncoderOptions, LayerNames
from mvllm.models.vision.grid_tower import GridTower, TowerSizes
from mvllm.models.vision.grids import Grid, frame_starts, interpolated

_NAMES = LayerNames(qkv="attn.qkv", output="attn.proj", attention_norm="norm1", mlp_norm="norm2")


class Glm4vTower(GridTower):
    """The tower of `Glm4vForConditionalGeneration` and of the models with experts.

    Args:
        ctx: Build context of a tower, see `MultiModalCausalLM`.
        vision: `vision_config`.
        out_size: The language model's `hidden_size`.
    """

    def __init__(self, ctx: BuildContext, vision: HFConfig, out_size: int) -> None:
        sizes = TowerSizes.from_config(vision, out_size)
        size, eps = sizes.hidden_size, vision.positive_number("rms_norm_eps", 1e-5)
        act = vision.get("hidden_act", "silu")
        options = EncoderOptions(
            size,
            out_size,
            sizes.num_heads,
            eps,
            act,
            norm=RMSNorm,
            qkv_bias=bool(vision.get("attention_bias", False)),
            output_bias=False,
            mlp_bias=False,
            gated=True,
            names=_NAMES,
        )
        super().__init__(ctx, sizes, options, patch_bias=True)
        self.patch_norm = RMSNorm(ctx, f"{self.name}.post_conv_layernorm", size, eps)
        self._side = vision.positive_int("image_size", 336) // sizes.patch[-1]
        self.positions = Embedding(ctx, f"{self.name}.embeddings.position_embedding", self._side**2, size)
        self.norm = RMSNorm(ctx, f"{self.name}.post_layernorm", size, eps)
        kernel = (size, sizes.merge, sizes.merge)
        self.downsample = PatchEmbedding(ctx, f"{self.name}.downsample", kernel, out_size, bias=True)
        inner = vision.positive_int("intermediate_size", 13696)
        self.merger = Glm4vMerger(ctx, f"{self.name}.merger", out_size, inner, act)

    def run(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        table = self.positions.weight.view(self._side, self._side, -1)
        positions = interpolated(table, grids, self.sizes.merge, bicubic=True, align_corners=False)
        x = self.patch_norm(self.patch_embed(pixels)) + positions.to(pixels.dtype)
        x = self.norm(self.layers(x, frame_starts(grids), self.angles(grids)))
        squares = x.unflatten(0, (-1, self.sizes.merge**2)).transpose(1, 2).flatten(1)
        return self.merger(self.downsample(squares))


class Glm4vMerger(nn.Module):
    """A product with norm and GELU, and a gated MLP.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        size, inner: Outer and inner size.
        act: Activation of the MLP.
    """

    def __init__(self, ctx: BuildContext, name: str, size: int, inner: int, act: str) -> None:
        super().__init__()
        self.projection = ReplicatedLinear(ctx, f"{name}.proj", size, size, bias=False)
        self.norm = LayerNorm(ctx, f"{name}.post_projection_norm", size, 1e-5)
        self.mlp = GatedMLP(ctx, name, size, inner, act, bias=False)
        self._gelu = activation(ctx, "gelu", size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, size] to [n, size]."""
        return self.mlp(self._gelu(self.norm(self.projection(x))))
