"""Rotary positions of patches: some pairs of a head's elements turn by the row, the others by the column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mvllm.config.hf_config import HFConfig
from mvllm.layers.context import BuildContext

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""The operation `rotary_embedding`."""


@dataclass(frozen=True)
class AxialAngles:
    """The angles of the patches of a step.

    Attributes:
        index: int32 [T]: each patch's row of `cos_sin`.
        cos_sin: [rows, head_size] float32: cosines, then sines, of half a head's elements.
        function: The operation `rotary_embedding`.
        order: int64 [head_size]: the elements of a head in the order in which element i is rotated with element
            i + head_size / 2; None if they are in this order.
    """

    index: torch.Tensor
    cos_sin: torch.Tensor
    function: Rotate
    order: torch.Tensor | None = None

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates query and key [T, heads, head_size]. The order of their elements may change, alike for both."""
        if self.order is not None:
            query, key = query.index_select(-1, self.order), key.index_select(-1, self.order)
        return self.function(self.index, query.contiguous(), key.contiguous(), self.cos_sin)


def patch_positions(grids: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Row and column of each patch of images with these numbers of rows and columns: float32 [T, 2], on the host."""
    parts = []
    for rows, columns in grids:
        row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
        parts.append(torch.stack((row, column), dim=-1))
    return torch.cat(parts).float()


def rope_theta(vision: HFConfig, default: float) -> float:
    """The base of a tower's frequencies, as older and newer configs have it.

    Raises:
        ModelError: It is not a number > 0.
    """
    settings = vision.require("rope_parameters", dict) if "rope_parameters" in vision else {}
    if "rope_theta" not in settings:
        return vision.positive_number("rope_theta", default)
    return HFConfig(settings, f"{vision.source}, rope_parameters").positive_number("rope_theta", default)


class AxialRope:
    """Makes the angles of patches.

    Args:
        ctx: Build context of the tower.
        head_size: Elements per head, a multiple of 4.
        frequencies: float32 [2, head_size / 4]: those of rows, and those of columns.
        order: As in AxialAngles.
    """

    def __init__(
        self, ctx: BuildContext, head_size: int, frequencies: torch.Tensor, order: Sequence[int] | None = None
    ) -> None:
        self._function = ctx.op("rotary_embedding", head_size=head_size, rotary_dim=head_size).function
        self._frequencies, self._device = frequencies, ctx.device
        self._order = None if order is None else torch.tensor(order, device=ctx.device)

    def angles(self, positions: torch.Tensor) -> AxialAngles:
        """The angles of patches at these positions, float32 [T, 2] on the host: row and column."""
        turned = torch.cat([positions[:, i : i + 1] * self._frequencies[i] for i in range(2)], dim=-1)
        cos_sin = torch.cat((turned.cos(), turned.sin()), dim=-1).to(self._device)
        index = torch.arange(len(positions), dtype=torch.int32, device=self._device)
        return AxialAngles(index, cos_sin, self._function, self._order)
