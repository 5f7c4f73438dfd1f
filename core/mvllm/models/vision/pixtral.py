"""Pixtral's tower: images of any size, rotary positions by row and column, RMS norms and gated MLPs without biases."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.layers.context import BuildContext
from mvllm.layers.norm import RMSNorm
from mvllm.layers.patch_embedding import PatchEmbedding, image_patches
from mvllm.models.item_encoder import Features
from mvllm.models.vision.axial_rope import AxialRope, positions_of_image, rope_theta
from mvllm.models.vision.encoder_layers import EncoderLayers, EncoderOptions, LayerNames
from mvllm.models.vision.feature_layers import FeatureLayers

PIXTRAL_TYPE = "pixtral"
_EPS = 1e-5  # not in config.json
_NAMES = LayerNames(
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.o_proj",
    gated_mlp="feed_forward",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
)

Grid = tuple[int, int]
"""Rows and columns of patches."""


class PixtralTower(nn.Module):
    """Pixtral's tower.

    Args:
        ctx: Build context of a tower.
        name: The checkpoint module.
        vision: The object `vision_config`.
        features: Which layers' states are the result.

    Attributes:
        patch_size: Pixels along each side of a patch.
        hidden_size: Elements of a layer's state.
        size: Elements of a patch's features.
    """

    def __init__(self, ctx: BuildContext, name: str, vision: HFConfig, features: FeatureLayers) -> None:
        super().__init__()
        self.hidden_size = size = vision.positive_int("hidden_size", 1024)
        heads = vision.positive_int("num_attention_heads", 16)
        options = EncoderOptions(
            hidden_size=size,
            intermediate_size=vision.positive_int("intermediate_size", 4096),
            num_heads=heads,
            eps=_EPS,
            hidden_act=vision.get("hidden_act", "gelu"),
            norm=RMSNorm,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            gated=True,
            names=_NAMES,
        )
        self._name = name
        self.patch_size = vision.positive_int("patch_size", 16)
        num_layers = vision.positive_int("num_hidden_layers", 24)
        self._keep = features.numbers(num_layers)
        self.size = size * len(self._keep)
        shape = (vision.positive_int("num_channels", 3), self.patch_size, self.patch_size)
        self.patches = PatchEmbedding(ctx, f"{name}.patch_conv", shape, size, bias=False)
        self.first_norm = RMSNorm(ctx, f"{name}.ln_pre", size, _EPS)
        self.layers = EncoderLayers(ctx, f"{name}.transformer.layers", options, max(self._keep))
        head_size = size // heads
        frequencies = rope_theta(vision, 1e4) ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        # Rows turn by every other frequency, columns by those in between.
        self._rope = AxialRope(ctx, head_size, torch.stack((frequencies[0::2], frequencies[1::2])))

    def encode_images(self, images: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Grid]]:
        """Computes images together.

        Args:
            images: Each [channels, height, width], compute dtype.

        Returns:
            The features of all patches [T, size], image by image and row by row, and the grid of each image.
        """
        grids = [(image.shape[1] // self.patch_size, image.shape[2] // self.patch_size) for image in images]
        x = torch.cat([image_patches(image.unsqueeze(0), self.patch_size)[0] for image in images])
        starts = [0]
        for rows, columns in grids:
            starts.append(starts[-1] + rows * columns)
        angles = self._rope.angles_of_images(grids, positions_of_image)
        return self.layers(self.first_norm(self.patches(x)), starts, angles, self._keep), grids

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the tower's checkpoint module is not needed for its result."""
        found = re.match(re.escape(self._name) + r"\.transformer\.layers\.(\d+)\.", name)
        return found is not None and int(found[1]) >= len(self.layers.layers)


def image_sizes(items: Sequence[Features]) -> list[torch.Tensor]:
    """The images of items [channels, height, width], without the padding behind `image_sizes`."""
    images = []
    for item in items:
        height, width = item["image_sizes"].flatten().tolist()
        images.append(item["pixel_values"].flatten(0, -4)[0, :, :height, :width])
    return images
