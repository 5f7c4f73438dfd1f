"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Qwen2-VL      layer norms; attention within each frame
Qwen2.5-VL    RMS norms and gated MLPs; attention within windows, except in some layers
Qwen3-VL      learned positions, interpolated to the grid; the results of some layers have mergers of their own, whose
              rows are added behind the first layers of the language model (DeepStack, arXiv:2406.04334)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.families.qwen_vl.family import deepstack_layers
from mvllm.layers.activation import activation
from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import Embedding
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import LayerNorm, NormMaker, RMSNorm
from mvllm.models.vision.encoder_layers import EncoderOptions, LayerNames
from mvllm.models.vision.grid_tower import GridTower, TowerSizes
from mvllm.models.vision.grids import Grid, frame_starts, interpolated, window_order

_EPS = 1e-6
_BLOCK = {"qkv": "attn.qkv", "output": "attn.proj", "attention_norm": "norm1", "mlp_norm": "norm2"}
_NAMES = LayerNames(**_BLOCK)
_NAMES_OF_QWEN3 = LayerNames(**_BLOCK, up="mlp.linear_fc1", down="mlp.linear_fc2")


class Merger(nn.Module):
    """Turns each square of patches into a row of embeddings: two products with GELU between them.

    Args:
        ctx: Build context.
        names: Checkpoint modules of the norm and of both products.
        sizes: The tower's sizes.
        norm: Class of the norm.
        norm_of_square: The norm is over each square of patches, instead of each patch.
    """

    def __init__(
        self,
        ctx: BuildContext,
        names: tuple[str, str, str],
        sizes: TowerSizes,
        norm: NormMaker,
        *,
        norm_of_square: bool = False,
    ) -> None:
        super().__init__()
        self._size, self._norm_of_square = sizes.hidden_size * sizes.merge**2, norm_of_square
        self.norm = norm(ctx, names[0], self._size if norm_of_square else sizes.hidden_size, _EPS)
        self.up = ReplicatedLinear(ctx, names[1], self._size, self._size, bias=True)
        self.down = ReplicatedLinear(ctx, names[2], self._size, sizes.out_size, bias=True)
        self._act = activation(ctx, "gelu", self._size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[patches, size] to [patches / merge ** 2, out_size]."""
        x = self.norm(x.view(-1, self._size)) if self._norm_of_square else self.norm(x).view(-1, self._size)
        return self.down(self._act(self.up(x)))


class Qwen2VLTower(GridTower):
    """The tower of Qwen2-VL. Arguments as of the others: the context of a tower, `vision_config`, and the language
    model's `hidden_size`."""

    def __init__(self, ctx: BuildContext, vision: HFConfig, out_size: int) -> None:
        sizes = TowerSizes.from_config(vision, out_size, hidden_size="embed_dim")
        inner = int(sizes.hidden_size * vision.positive_number("mlp_ratio", 4))
        act = vision.get("hidden_act", "quick_gelu")
        options = EncoderOptions(sizes.hidden_size, inner, sizes.num_heads, _EPS, act, names=_NAMES)
        super().__init__(ctx, sizes, options, patch_bias=False)
        self.merger = Merger(ctx, _merger_names(self.name), sizes, LayerNorm)

    def run(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        return self.merger(self.layers(self.patch_embed(pixels), frame_starts(grids), self.angles(grids)))


class Qwen2_5_VLTower(GridTower):
    """The tower of Qwen2.5-VL.

    Patches are computed in an order in which those of a window are adjacent. Frames have the same patches in it.
    """

    def __init__(self, ctx: BuildContext, vision: HFConfig, out_size: int) -> None:
        sizes = TowerSizes.from_config(vision, out_size)
        inner, act = vision.positive_int("intermediate_size", 3420), vision.get("hidden_act", "silu")
        size, heads = sizes.hidden_size, sizes.num_heads
        options = EncoderOptions(size, inner, heads, _EPS, act, norm=RMSNorm, gated=True, names=_NAMES)
        super().__init__(ctx, sizes, options, patch_bias=False)
        pixels = vision.positive_int("window_size", 112)
        self._window = pixels // sizes.merge // sizes.patch[-1]
        if self._window < 1:
            least = sizes.merge * sizes.patch[-1]
            raise ModelError(f"{vision.source}: window_size should be at least {least} pixels, found {pixels}.")
        full = vision.get("fullatt_block_indexes", [7, 15, 23, 31])
        if not isinstance(full, list) or not all(type(layer) is int for layer in full):
            raise ModelError(f"{vision.source}: 'fullatt_block_indexes' should be a list of numbers, found {full!r}.")
        self._full_layers = frozenset(full)
        self.merger = Merger(ctx, _merger_names(self.name), sizes, RMSNorm)

    def run(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        in_square = self.sizes.merge**2
        squares, windows = window_order(grids, self.sizes.merge, self._window)
        patches = (squares.unsqueeze(1) * in_square + torch.arange(in_square)).flatten()
        angles, frames = self.angles(grids, patches), frame_starts(grids)
        x = self.patch_embed(pixels).index_select(0, patches.to(pixels.device))
        count = self.sizes.num_layers
        starts = [frames if number in self._full_layers else windows for number in range(count)]
        x = self.layers.states(x, starts, angles, (count,))[count]
        return self.merger(x).index_select(0, squares.argsort().to(pixels.device))


class Qwen3VLTower(GridTower):
    """The tower of Qwen3-VL: rows of embeddings, and beside them those of the DeepStack layers, by rising layer."""

    def __init__(self, ctx: BuildContext, vision: HFConfig, out_size: int) -> None:
        sizes = TowerSizes.from_config(vision, out_size)
        inner, act = vision.positive_int("intermediate_size", 4304), vision.get("hidden_act", "gelu_pytorch_tanh")
        options = EncoderOptions(sizes.hidden_size, inner, sizes.num_heads, _EPS, act, names=_NAMES_OF_QWEN3)
        super().__init__(ctx, sizes, options, patch_bias=True)
        count = vision.positive_int("num_position_embeddings", 2304)
        self._side = math.isqrt(count)
        if self._side**2 != count:
            raise ModelError(f"{vision.source}: 'num_position_embeddings' should be a square, found {count}.")
        self.positions = Embedding(ctx, f"{self.name}.pos_embed", count, sizes.hidden_size)

        def merger(name: str, *, norm_of_square: bool) -> Merger:
            names = f"{name}.norm", f"{name}.linear_fc1", f"{name}.linear_fc2"
            return Merger(ctx, names, sizes, LayerNorm, norm_of_square=norm_of_square)

        self.merger = merger(f"{self.name}.merger", norm_of_square=False)
        layers = deepstack_layers(vision)
        self.deepstack_mergers = nn.ModuleList(
            merger(f"{self.name}.deepstack_merger_list.{i}", norm_of_square=True) for i in range(len(layers))
        )
        # By the number of the state that each of them reads, as EncoderLayers.states counts.
        self._deepstack = sorted((layer + 1, i) for i, layer in enumerate(layers))

    def run(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        table = self.positions.weight.view(self._side, self._side, -1)
        positions = interpolated(table, grids, self.sizes.merge, bicubic=False, align_corners=True)
        x = self.patch_embed(pixels) + positions.to(pixels.dtype)
        count = self.sizes.num_layers
        keep = {count, *(number for number, _ in self._deepstack)}
        states = self.layers.states(x, [frame_starts(grids)] * count, self.angles(grids), keep)
        added = [self.deepstack_mergers[i](states[number]) for number, i in self._deepstack]
        return torch.cat([self.merger(states[count]), *added], dim=-1)


def _merger_names(tower: str) -> tuple[str, str, str]:
    return f"{tower}.merger.ln_q", f"{tower}.merger.mlp.0", f"{tower}.merger.mlp.2"
