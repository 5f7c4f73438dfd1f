"""LLaVA-OneVision: a large image is cut into tiles of the tower's size, beside the whole image in one tile.

    tile 0     the whole image, resized: grid x grid embeddings
    others     the image at one of the sizes of `image_grid_pinpoints`: the patches of all tiles as one picture, without
               the padding around the image, shrunk if they are too many; each row ends with the vector image_newline

One of several images of a prompt has tile 0 alone, with one image_newline behind it. So has a video, whose frames are
tiles that are shrunk to half of their rows and columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.checkpoint_tensor import CheckpointTensor
from mvllm.layers.context import BuildContext
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM
from mvllm.models.vision.clip import ClipTower
from mvllm.models.vision.feature_layers import FeatureLayers
from mvllm.models.vision.projector import TwoLayerProjector

_SHRINKS_ABOVE = 1.1
_ASPECT_RATIO = re.compile(r"anyres_max_(\d+)")


class LlavaOnevision(MultiModalCausalLM):
    """`LlavaOnevisionForConditionalGeneration` of Hugging Face checkpoints, before the class of its language model."""

    encoder_modules = (*MultiModalCausalLM.encoder_modules, "image_newline")

    def build_item_encoder(self, ctx: BuildContext) -> ItemEncoder:
        return LlavaOnevisionEncoder(ctx, self.config, self.part_config("vision_config"))


class LlavaOnevisionEncoder(ItemEncoder):
    """Tower, projector and the arrangement of tiles.

    Args:
        ctx: Build context of a tower.
        config: Of the model.
        vision: The object `vision_config`.
    """

    def __init__(self, ctx: BuildContext, config: ModelConfig, vision: HFConfig) -> None:
        super().__init__()
        hf = config.hf_config
        features = FeatureLayers.from_config(hf, layer=-1, strategy="full")
        self.tower = ClipTower(ctx, "vision_tower", vision, features)
        self.projector = TwoLayerProjector.read(ctx, self.tower.size, config)
        self.newline = CheckpointTensor(ctx, "image_newline", config.hidden_size)
        self._tile_size = self.tower.image_size
        self._sizes = image_grid_sizes(hf, self._tile_size)
        self._most_tiles = most_tiles(hf)

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        pixels = "pixel_values_videos" if modality == "video" else "pixel_values"
        tiles = [item[pixels].flatten(0, -4) for item in items]
        states = self.projector(self.tower(torch.cat(tiles)).flatten(0, 1)).unflatten(0, (sum(map(len, tiles)), -1))
        of_items = states.split([len(each) for each in tiles])
        if modality == "video":
            return [self._frames(each) for each in of_items]
        return [
            self._tiles(each, *item["image_sizes"].flatten().tolist())
            for each, item in zip(of_items, items, strict=True)
        ]

    def _tiles(self, states: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The embeddings of an image of this size: [tiles, patches, hidden_size] to [rows, hidden_size]."""
        newline = self.newline.weight
        if len(states) == 1:
            return torch.cat((states[0], newline.unsqueeze(0)))
        grid = self.tower.grid
        rows, columns = (side // self._tile_size for side in best_size(self._sizes, height, width))
        # [rows, columns of tiles, rows, columns of patches, hidden_size] to [hidden_size, rows, columns]
        picture = states[1:].unflatten(0, (rows, columns)).unflatten(2, (grid, grid)).permute(4, 0, 2, 1, 3)
        picture = _without_padding(picture.flatten(1, 2).flatten(2, 3), height, width)
        ratio = math.sqrt(picture.shape[1] * picture.shape[2] / (self._most_tiles * grid**2))
        if ratio > _SHRINKS_ABOVE:
            size = [int(picture.shape[1] // ratio), int(picture.shape[2] // ratio)]
            picture = F.interpolate(picture.unsqueeze(0), size, mode="bilinear")[0]
        ends = newline.view(-1, 1, 1).expand(-1, picture.shape[1], 1)
        return torch.cat((states[0], torch.cat((picture, ends), dim=2).flatten(1).transpose(0, 1)))

    def _frames(self, states: torch.Tensor) -> torch.Tensor:
        """The embeddings of a video: [frames, patches, hidden_size] to [rows, hidden_size]."""
        grid = self.tower.grid
        pictures = states.unflatten(1, (grid, grid)).permute(0, 3, 1, 2)
        half = math.ceil(grid / 2)
        shrunk = F.interpolate(pictures, size=[half, half], mode="bilinear").flatten(2).transpose(1, 2)
        return torch.cat((shrunk.flatten(0, 1), self.newline.weight.unsqueeze(0)))

    def ignores(self, name: str) -> bool:
        return self.tower.ignores(name)


def image_grid_sizes(hf: HFConfig, tile_size: int) -> list[tuple[int, int]]:
    """`image_grid_pinpoints`: heights and widths of images that are cut into tiles; by default up to 6 x 6 tiles.

    Raises:
        ModelError: They are no list of pairs of multiples of the tile's size.
    """
    found = hf.get("image_grid_pinpoints")
    if found is None:
        return [(rows * 384, columns * 384) for rows in range(1, 7) for columns in range(1, 7)]
    if not isinstance(found, list) or not all(_is_size(each, tile_size) for each in found) or not found:
        raise ModelError(
            f"{hf.source}: 'image_grid_pinpoints' should be a list of heights and widths, multiples of "
            f"{tile_size}, found {found!r:.80}."
        )
    return [(height, width) for height, width in found]


def _is_size(value: object, tile_size: int) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(type(side) is int and side > 0 and side % tile_size == 0 for side in value)


def most_tiles(hf: HFConfig) -> int:
    """The number in `vision_aspect_ratio`: pictures with the patches of more tiles are shrunk.

    Raises:
        ModelError: It has another form.
    """
    found = hf.get("vision_aspect_ratio", "anyres_max_9")
    match = _ASPECT_RATIO.fullmatch(found) if isinstance(found, str) else None
    if match is None or int(match[1]) == 0:
        raise ModelError(
            f"{hf.source}: 'vision_aspect_ratio' should be 'anyres_max_' and a number above 0, found {found!r:.80}."
        )
    return int(match[1])


def best_size(sizes: Sequence[tuple[int, int]], height: int, width: int) -> tuple[int, int]:
    """The size that keeps most pixels of an image, and of those the one that wastes the fewest.

    Args:
        sizes: Heights and widths.
        height, width: Of the image.
    """
    best, best_fit = sizes[0], (-1, 0)
    for rows, columns in sizes:
        scale = min(columns / width, rows / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        fit = (used, used - rows * columns)
        if fit > best_fit:
            best, best_fit = (rows, columns), fit
    return best


def _without_padding(picture: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Cuts off the patches of the padding around an image of this size: [hidden_size, rows, columns] to the same."""
    rows, columns = picture.shape[1:]
    if width / height > columns / rows:
        used = int(round(height * (columns / width), 7))
        padding = (rows - used) // 2
        return picture[:, padding : rows - padding]
    used = int(round(width * (rows / height), 7))
    padding = (columns - used) // 2
    return picture[:, :, padding : columns - padding]
