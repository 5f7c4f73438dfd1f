"""Geometry of grids of patches: order, positions, windows and interpolated position embeddings.

An image or video is a grid of frames x rows x columns of patches. Each square of `merge` x `merge` patches becomes one
row of embeddings, so its patches are adjacent:

    columns      0  1  2  3
    row 0        0  1  4  5        merge = 2: the numbers are places in the sequence
    row 1        2  3  6  7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch

CACHED_GRIDS = 64
"""Grids whose windows and weights are kept: images of one source have few sizes."""


@dataclass(frozen=True)
class Grid:
    """Numbers of frames, rows and columns; a frame is `temporal_patch_size` frames of a video."""

    frames: int
    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        """Patches of all frames."""
        return self.frames * self.rows * self.columns

    @classmethod
    def of(cls, grid_thw: torch.Tensor) -> Grid:
        """The grid of one item: [1, 3] or [3], integers."""
        frames, rows, columns = grid_thw.flatten().tolist()
        return cls(frames, rows, columns)


def frame_starts(grids: Sequence[Grid]) -> tuple[int, ...]:
    """The first patch of each frame, and the end of the last one: patches attend to those of their frame."""
    sizes = [grid.rows * grid.columns for grid in grids for _ in range(grid.frames)]
    return tuple(accumulate(sizes, initial=0))


def in_squares(values: torch.Tensor, merge: int) -> torch.Tensor:
    """[rows, columns, ...] to [rows * columns, ...], in the order of the patches of one frame."""
    rows, columns = values.shape[:2]
    squares = values.unflatten(0, (rows // merge, merge)).unflatten(2, (columns // merge, merge)).transpose(1, 2)
    return squares.flatten(0, 3)


def patch_positions(grids: Sequence[Grid], merge: int) -> torch.Tensor:
    """[patches, 2], int64, host: row and column of each patch."""
    parts = []
    for grid in grids:
        rows, columns = torch.meshgrid(torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
        parts.append(in_squares(torch.stack((rows, columns), dim=-1), merge).repeat(grid.frames, 1))
    return torch.cat(parts)


def window_order(grids: Sequence[Grid], merge: int, window: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The order in which the patches of each window are adjacent.

    Windows are squares of `window` x `window` squares, from the upper left corner of each frame; those at the right and
    lower edges are smaller.

    Returns:
        The squares in that order [patches / merge ** 2], int64, host; and the first patch of each window in it, with
        the end of the last one.
    """
    order: list[torch.Tensor] = []
    sizes: list[int] = []
    first = 0
    for grid in grids:
        squares, of_windows = _window_order(grid, merge, window)
        order.append(squares + first)
        sizes += of_windows
        first += len(squares)
    return torch.cat(order), tuple(accumulate(sizes, initial=0))


@lru_cache(CACHED_GRIDS)
def _window_order(grid: Grid, merge: int, window: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The squares of one grid, and the number of patches of each window. The tensor must not be changed."""
    order, sizes, first = [], [], 0
    rows, columns = grid.rows // merge, grid.columns // merge
    for _ in range(grid.frames):
        squares = torch.arange(first, first + rows * columns).view(rows, columns)
        for band in squares.split(window):
            for part in band.split(window, dim=1):
                order.append(part.flatten())
                sizes.append(part.numel() * merge * merge)
        first += rows * columns
    return torch.cat(order), tuple(sizes)


def interpolated(
    table: torch.Tensor, grids: Sequence[Grid], merge: int, *, bicubic: bool, align_corners: bool
) -> torch.Tensor:
    """A square of position embeddings, resampled to the rows and columns of each grid, as `interpolate` of torch does.

    Rows and columns are resampled one after the other, by matrix products in float32.

    Args:
        table: [side, side, size].
        grids: The grids.
        merge: As above.
        bicubic: Four values of each axis contribute instead of two.
        align_corners: The outermost patches have the outermost embeddings.

    Returns:
        [patches, size], float32.
    """
    side = table.shape[0]
    wide, found = table.float(), {}
    for grid in grids:
        size = grid.rows, grid.columns
        if size not in found:
            of_rows, of_columns = (
                _axis_weights(n, side, bicubic=bicubic, align_corners=align_corners).to(table.device) for n in size
            )
            bands = (of_rows @ wide.flatten(1)).unflatten(1, wide.shape[1:])
            found[size] = in_squares(of_columns @ bands, merge)
    return torch.cat([found[grid.rows, grid.columns].repeat(grid.frames, 1) for grid in grids])


@lru_cache(2 * CACHED_GRIDS)
def _axis_weights(length: int, side: int, *, bicubic: bool, align_corners: bool) -> torch.Tensor:
    """[length, side], float32, host, read-only: the weights of the source values for each of `length` places."""
    places = torch.arange(length, dtype=torch.float32)
    if align_corners:
        source = places * ((side - 1) / max(length - 1, 1))
    else:
        source = (places + 0.5) * (side / length) - 0.5
        if not bicubic:
            source = source.clamp(min=0.0)
    first = source.floor()
    offsets = torch.arange(-1, 3) if bicubic else torch.arange(0, 2)
    distance = (source.unsqueeze(1) - first.unsqueeze(1) - offsets).abs()
    values = _keys_kernel(distance) if bicubic else (1.0 - distance).clamp(min=0.0)
    taps = (first.long().unsqueeze(1) + offsets).clamp(0, side - 1)
    return torch.zeros(length, side).scatter_add_(1, taps, values)


def _keys_kernel(distance: torch.Tensor, a: float = -0.75) -> torch.Tensor:
    """The kernel of cubic convolution (Keys 1981), for distances up to 2."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return torch.where(distance <= 1, near, far)
