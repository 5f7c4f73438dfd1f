"""GridTower: vision transformers over grids of patches with two-dimensional rotary embedding (Qwen-VL, GLM-4V).

    patches [n, width] ─ product ─> [n, size] ─ layers ─> [n, size] ─ merger ─> [n / merge², hidden_size]

Several images and videos of different sizes are computed together: the patches of all frames follow each other, and
attention is within each frame, or within each window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.patch_embedding import PatchEmbedding
from mvllm.models.item_encoder import Features, ItemEncoder
from mvllm.models.vision.axial_rope import AxialAngles, AxialRope, Size, rope_theta
from mvllm.models.vision.encoder_layers import EncoderLayers, EncoderOptions
from mvllm.models.vision.grids import Grid, patch_positions

_THETA = 10_000.0
_IMAGE_FEATURES = "pixel_values", "image_grid_thw"
_VIDEO_FEATURES = "pixel_values_videos", "video_grid_thw"


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of a tower.

    Attributes:
        patch: Channels, frames, rows and columns of a patch.
        hidden_size, num_heads, num_layers: Of the layers.
        merge: A square of merge x merge patches becomes one row of embeddings.
        out_size: Elements of such a row.
        theta: Base of the rotary frequencies.
    """

    patch: tuple[int, int, int, int]
    hidden_size: int
    num_heads: int
    num_layers: int
    merge: int
    out_size: int
    theta: float

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def from_config(cls, vision: HFConfig, out_size: int, *, hidden_size: str = "hidden_size") -> TowerSizes:
        """The sizes in `vision_config`.

        Args:
            vision: The object.
            out_size: Elements of a row of embeddings: the language model's `hidden_size`.
            hidden_size: The key of the size of the layers.

        Raises:
            ModelError: A value is missing or does not fit the others.
        """
        size, num_heads = vision.positive_int(hidden_size), vision.positive_int("num_heads", 16)
        if size % (4 * num_heads):
            raise ModelError(
                f"{vision.source}: {hidden_size} should be a multiple of four times num_heads {num_heads}, found "
                f"{size}."
            )
        if vision.positive_int("out_hidden_size", out_size) != out_size:
            raise ModelError(
                f"{vision.source}: out_hidden_size should be the language model's hidden_size {out_size}, found "
                f"{vision.positive_int('out_hidden_size')}."
            )
        patch, frames = vision.positive_int("patch_size", 14), vision.positive_int("temporal_patch_size", 2)
        channels = vision.positive_int("in_channels", vision.positive_int("in_chans", 3))
        return cls(
            patch=(channels, frames, patch, patch),
            hidden_size=size,
            num_heads=num_heads,
            num_layers=vision.positive_int("depth"),
            merge=vision.positive_int("spatial_merge_size", 2),
            out_size=out_size,
            theta=rope_theta(vision, _THETA),
        )


class GridTower(ItemEncoder):
    """A vision tower without its merger. Subclasses build the rest and override `run`.

    Args:
        ctx: Build context of a tower, see `MultiModalCausalLM`.
        sizes: The sizes.
        options: Of the layers.
        patch_bias: Whether the product of the patches has a bias.
    """

    name = "visual"

    def __init__(self, ctx: BuildContext, sizes: TowerSizes, options: EncoderOptions, *, patch_bias: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch_embed = PatchEmbedding(
            ctx, f"{self.name}.patch_embed.proj", sizes.patch, sizes.hidden_size, bias=patch_bias
        )
        self.layers = EncoderLayers(ctx, f"{self.name}.blocks", options, sizes.num_layers)
        half = sizes.head_size // 2
        frequencies = 1.0 / sizes.theta ** (torch.arange(0, half, 2, dtype=torch.int64).float() / half)
        self._rope = AxialRope(ctx, sizes.head_size, frequencies.expand(2, -1))

    def encode(self, modality: str, items: Sequence[Features]) -> list[torch.Tensor]:
        pixels, grid_thw = _VIDEO_FEATURES if modality == "video" else _IMAGE_FEATURES
        grids = [Grid.of(item[grid_thw]) for item in items]
        counts = [grid.num_patches // self.sizes.merge**2 for grid in grids]
        return list(self.run(torch.cat([item[pixels] for item in items]), grids).split(counts))

    @abstractmethod
    def run(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """The embeddings of all items.

        Args:
            pixels: [patches, elements of a patch], compute dtype.
            grids: The grids of the items, in order.

        Returns:
            [patches / merge ** 2, embedding_width].
        """

    def angles(self, grids: Sequence[Grid], order: torch.Tensor | None = None) -> AxialAngles:
        """The rotary embedding of all patches, in the given order of them if there is one."""
        frames = [(grid.rows, grid.columns) for grid in grids for _ in range(grid.frames)]
        return self._rope.angles_of_images(frames, self._positions, order)

    def _positions(self, size: Size) -> torch.Tensor:
        return patch_positions([Grid(1, *size)], self.sizes.merge).float()
