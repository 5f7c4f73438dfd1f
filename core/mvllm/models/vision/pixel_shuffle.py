"""Pixel shuffle: adjacent patches become one longer row, so that an image takes fewer rows of the language model.

a b c d        factor 2
e f g h   ->   a b e f | c d g h
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mvllm.layers.activation import activation
from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import LayerNorm

_EPS = 1e-5


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


class ShuffledProjector(nn.Module):
    """A norm and two linear layers over shuffled patches: the projector of InternVL and LFM2-VL.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        in_features: Elements of a row of shuffled patches.
        inner_size, out_features: Results of the two layers.
        hidden_act: Activation between them.
        norm: Whether there is a norm.
        bias: Whether the layers have biases.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        in_features: int,
        inner_size: int,
        out_features: int,
        hidden_act: str,
        *,
        norm: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm = LayerNorm(ctx, f"{name}.layer_norm", in_features, _EPS) if norm else None
        self.inner = ReplicatedLinear(ctx, f"{name}.linear_1", in_features, inner_size, bias=bias)
        self.outer = ReplicatedLinear(ctx, f"{name}.linear_2", inner_size, out_features, bias=bias)
        self._act = activation(ctx, hidden_act, inner_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] to [T, out_features]."""
        x = x if self.norm is None else self.norm(x)
        return self.outer(self._act(self.inner(x)))
