"""Pixel shuffle: adjacent patches become one longer row, so that an image takes fewer rows of the language model.

a b c d        factor 2
e f g h   ->   a b e f | c d g h
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pixel_shuffle(x: torch.Tensor, rows: int, columns: int, factor: int) -> torch.Tensor:
    """Joins squares of patches.

    Args:
        x: [n, rows * columns, size], or [n * rows * columns, size].
        rows, columns: Patches of each image along its sides, multiples of `factor`.
        factor: Patches along each side of a square.

    Returns:
        [n * rows / factor * columns / factor, size * factor * factor]: square by square; the patches of a square follow
        each other row by row.
    """
    size = x.shape[-1]
    squares = x.reshape(-1, rows // factor, factor, columns // factor, factor, size)
    return squares.transpose(2, 3).reshape(-1, factor * factor * size)


def shuffle_images(states: torch.Tensor, grids: Sequence[tuple[int, int]], factor: int) -> list[torch.Tensor]:
    """`pixel_shuffle` of images of several sizes.

    Args:
        states: [patches of all images, size].
        grids: Rows and columns of patches of each image.
        factor: As in `pixel_shuffle`.
    """
    parts = states.split([rows * columns for rows, columns in grids])
    return [pixel_shuffle(part, *grid, factor) for part, grid in zip(parts, grids, strict=True)]
