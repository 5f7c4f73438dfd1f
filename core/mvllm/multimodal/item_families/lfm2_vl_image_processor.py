"""The image processor of LFM2-VL with Pillow and numpy. That of transformers needs torchvision.

A small image is resized. A large one is cut into square tiles, followed by a small version of the whole (thumbnail):

    rows 1, columns 2        [tile | tile]  [thumbnail]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

Array = np.ndarray[Any, Any]


class Lfm2VlImagesKwargs(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    """The settings of `preprocessor_config.json`, under the names of transformers' Lfm2VlImageProcessor."""

    downsample_factor: int
    do_image_splitting: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool
    min_image_tokens: int
    max_image_tokens: int
    encoder_patch_size: int
    tile_size: int
    max_pixels_tolerance: float
    return_row_col_info: bool


@dataclass(frozen=True)
class ImageLayout:
    """How an image is cut.

    Attributes:
        rows, columns: The grid of tiles; 1 and 1 for none.
        height, width: Size of the image without tiles, or of the thumbnail, in pixels.
    """

    rows: int
    columns: int
    height: int
    width: int


class Lfm2VlImageProcessorPil(PilBackend):  # type: ignore[misc]
    """Returns the features of transformers' Lfm2VlImageProcessor, up to the rounding of resized pixels."""

    downsample_factor = 2
    do_image_splitting = True
    min_tiles = 2
    max_tiles = 10
    use_thumbnail = True
    min_image_tokens = 64
    max_image_tokens = 256
    encoder_patch_size = 16
    tile_size = 512
    max_pixels_tolerance = 2.0
    do_resize = True
    size: ClassVar[dict[str, int]] = {"height": 512, "width": 512}
    resample = PILImageResampling.BILINEAR
    do_convert_rgb = True
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True
    do_pad = True
    return_row_col_info = False
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    valid_kwargs = Lfm2VlImagesKwargs
    model_input_names: ClassVar[list[str]] = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]

    def _preprocess(self, images: list[Array], return_tensors: Any = None, **settings: Any) -> BatchFeature:
        layouts = [image_layout(image.shape[-2], image.shape[-1], settings) for image in images]
        patch_size = settings["encoder_patch_size"]
        patches: list[Array] = []
        shapes: list[list[int]] = []
        for image, layout in zip(images, layouts, strict=True):
            for part in self._parts(image, layout, settings):
                normal = self._normalised(part, settings)
                shapes.append([side // patch_size for side in normal.shape[-2:]])
                patches.append(_patches(normal, patch_size))
        longest = max(map(len, patches))
        values = np.zeros((len(patches), longest, patches[0].shape[1]), np.float32)
        mask = np.zeros((len(patches), longest), np.int32)
        for i, rows in enumerate(patches):
            values[i, : len(rows)] = rows
            mask[i, : len(rows)] = 1
        data: dict[str, Any] = {
            "pixel_values": values,
            "pixel_attention_mask": mask,
            "spatial_shapes": np.array(shapes, np.int64),
        }
        if settings.get("return_row_col_info"):
            data["image_rows"] = [layout.rows for layout in layouts]
            data["image_cols"] = [layout.columns for layout in layouts]
            data["image_sizes"] = [[layout.height, layout.width] for layout in layouts]
        return BatchFeature(data, tensor_type=return_tensors)

    def _parts(self, image: Array, layout: ImageLayout, settings: dict[str, Any]) -> list[Array]:
        """The tiles, row by row, and the thumbnail; or the resized image."""

        def resized(height: int, width: int) -> Array:
            return self.resize(image, SizeDict(height=height, width=width), resample=settings["resample"])

        rows, columns = layout.rows, layout.columns
        if rows * columns == 1:
            return [resized(layout.height, layout.width)]
        tile = settings["tile_size"]
        whole = resized(rows * tile, columns * tile)
        parts = [
            whole[:, row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
            for row in range(rows)
            for column in range(columns)
        ]
        return [*parts, resized(layout.height, layout.width)] if settings["use_thumbnail"] else parts

    def _normalised(self, part: Array, settings: dict[str, Any]) -> Array:
        if settings["do_rescale"]:
            part = self.rescale(part, settings["rescale_factor"])
        if settings["do_normalize"]:
            part = self.normalize(part, settings["image_mean"], settings["image_std"])
        return part


def image_layout(height: int, width: int, settings: dict[str, Any]) -> ImageLayout:
    """The layout of an image.

    Sides are multiples of the pixels that become one embedding along each side, so that no embedding is padded.
    """
    unit = settings["encoder_patch_size"] * settings["downsample_factor"]
    fewest, most = (settings[name] * unit**2 for name in ("min_image_tokens", "max_image_tokens"))

    def rounded(side: int) -> int:
        return round(side / unit) * unit

    new_height, new_width = max(unit, rounded(height)), max(unit, rounded(width))
    if new_height * new_width > most:
        shrink = math.sqrt(height * width / most)
        new_height, new_width = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
    elif new_height * new_width < fewest:
        grow = math.sqrt(fewest / (height * width))
        new_height, new_width = (math.ceil(side * grow / unit) * unit for side in (height, width))
    rows = columns = 1
    most_tiles = settings["max_tiles"] if settings["do_image_splitting"] else 1
    fewest_tiles = settings["min_tiles"] if settings["do_image_splitting"] else 1
    patch = settings["encoder_patch_size"]
    pixels = max(patch, rounded(height)) * max(patch, rounded(width))
    if most_tiles > 1 and pixels > most * settings["max_pixels_tolerance"]:
        rows, columns = _grid(height, width, fewest_tiles, most_tiles, settings["tile_size"])
    return ImageLayout(rows, columns, new_height, new_width)


def _grid(height: int, width: int, fewest: int, most: int, tile_size: int) -> tuple[int, int]:
    """Rows and columns of the grid whose aspect ratio is closest to the image's.

    Of equally close grids, a larger one is chosen if the image has more than half of its pixels.
    """
    best, best_difference = (1, 1), math.inf
    for columns, rows in _grids(fewest, most):
        difference = abs(width / height - columns / rows)
        fills = width * height > 0.5 * tile_size**2 * columns * rows
        if difference < best_difference or (difference == best_difference and fills):
            best, best_difference = (rows, columns), difference
    return best


@functools.lru_cache(maxsize=16)
def _grids(fewest: int, most: int) -> list[tuple[int, int]]:
    """(columns, rows) by number of tiles. Those of equal number have the order of a set, as in transformers."""
    found = {
        (columns, rows)
        for count in range(fewest, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if fewest <= columns * rows <= most
    }
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def _patches(image: Array, size: int) -> Array:
    """[channels, height, width] to [patches, size * size * channels]."""
    channels, height, width = image.shape
    grid = image.reshape(channels, height // size, size, width // size, size)
    return grid.transpose(1, 3, 2, 4, 0).reshape(-1, size * size * channels)
