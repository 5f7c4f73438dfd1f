"""Idefics3 and SmolVLM: a SigLIP tower over tiles, pixel shuffle, one linear layer, and a language model.

A large image becomes several tiles and a small version of the whole, all of one size. Each has its own placeholders,
with text between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.embedding import Embedding
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import LayerNorm
from mvllm.layers.patch_embedding import PatchEmbedding, image_patches
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.encoder_layers import EncoderLayers, EncoderOptions
from mvllm.models.vision.pixel_shuffle import shuffle_images
from mvllm.models.vision.square_size import square_size

_JUST_BELOW_ONE = 1.0 - 1e-6


class Idefics3(MultiModalCausalLM):
    """`Idefics3ForConditionalGeneration` and `SmolVLMForConditionalGeneration` of Hugging Face checkpoints, before the
    class of their language model."""

    encoder_modules = ("vision_model", "connector")

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return Idefics3Encoder(ctx, self.config, self.part_config("vision_config"))


class Idefics3Encoder(ItemEncoder):
    """Tower and connector.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision: The object `vision_config`.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig) -> None:
        super().__init__()
        self._factor = config.hf_config.positive_int("scale_factor", 2)
        self.tower = Idefics3Tower(ctx, "vision_model", vision)
        self.projection = ReplicatedLinear(
            ctx,
            "connector.modality_projection.proj",
            self.tower.size * self._factor**2,
            config.hidden_size,
            bias=False,
        )

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        tiles = [item["pixel_values"].flatten(0, -4) for item in items]
        counts, grids = [len(each) for each in tiles], [self.tower.grid(each) for each in tiles]
        of_tiles = [grid for grid, count in zip(grids, counts, strict=True) for _ in range(count)]
        shuffled = torch.cat(shuffle_images(self.tower(tiles), of_tiles, self._factor))
        rows = [math.prod(grid) // self._factor**2 * count for grid, count in zip(grids, counts, strict=True)]
        return list(self.projection(shuffled).split(rows))


class Idefics3Tower(nn.Module):
    """A SigLIP tower. A tile of another size than the tower's takes positions in proportion to its sides.

    Args:
        ctx: Build context of a tower.
        name: The checkpoint module.
        vision: The object `vision_config`.

    Attributes:
        size: Elements of a patch's features.
    """

    def __init__(self, ctx: BuildContext, name: str, vision: HFConfig) -> None:
        super().__init__()
        options = EncoderOptions.read(
            vision,
            hidden_size=1152,
            intermediate_size=3072,
            num_heads=16,
            eps=1e-6,
            act="gelu_pytorch_tanh",
        )
        self.size = size = options.hidden_size
        self._patch_size = square_size(vision, "patch_size", 32)
        self._positions_per_side = square_size(vision, "image_size", 224) // self._patch_size
        shape = (vision.positive_int("num_channels", 3), self._patch_size, self._patch_size)
        self.patches = PatchEmbedding(ctx, f"{name}.embeddings.patch_embedding", shape, size, bias=True)
        self.positions = Embedding(ctx, f"{name}.embeddings.position_embedding", self._positions_per_side**2, size)
        num_layers = vision.positive_int("num_hidden_layers", 12)
        self.layers = EncoderLayers(ctx, f"{name}.encoder.layers", options, num_layers)
        self.norm = LayerNorm(ctx, f"{name}.post_layernorm", size, options.eps)

    def grid(self, tiles: torch.Tensor) -> tuple[int, int]:
        """Rows and columns of patches of tiles [n, channels, height, width]."""
        return tiles.shape[-2] // self._patch_size, tiles.shape[-1] // self._patch_size

    def forward(self, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tiles of several sizes, [n, channels, height, width] of each size, to features [patches of all, size]."""
        parts, lengths = [], []
        for each in tiles:
            rows, columns = self.grid(each)
            patches = self.patches(image_patches(each, self._patch_size).flatten(0, 1))
            table = self.positions(self._position_ids(rows, columns).to(patches.device))
            parts.append((patches.unflatten(0, (len(each), -1)) + table).flatten(0, 1))
            lengths += [rows * columns] * len(each)
        return self.norm(self.layers(torch.cat(parts), (0, *itertools.accumulate(lengths))))

    def _position_ids(self, rows: int, columns: int) -> torch.Tensor:
        """int64 [rows * columns]: the position of each patch; in float32, with transformers' rounding."""
        per_side = self._positions_per_side
        bounds = torch.arange(1 / per_side, 1.0, 1 / per_side)
        row, column = (
            torch.bucketize(
                (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=_JUST_BELOW_ONE),
                bounds,
                right=True,
            )
            for count in (rows, columns)
        )
        return (row[:, None] * per_side + column).flatten()
