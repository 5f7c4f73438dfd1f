"""Rotary positions of patches: some pairs of a head's elements turn by the row, the others by the column."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mvllm.config.hf_config import HFConfig
from mvllm.layers.context import BuildContext

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""The operation `rotary_embedding`."""

Size = tuple[int, int]
"""Rows and columns of patches."""


CACHED_ROWS = 1 << 15
"""Most patches whose angles a tower keeps, besides those of the last image."""


@dataclass(frozen=True)
class AxialAngles:
    """The angles of the patches of a step.

    Attributes:
        index: int32 [T]: each patch's row of `cos_sin`.
        cos_sin: [rows, head_size] float32: cosines, then sines, of half a head's elements.
        function: The operation `rotary_embedding`.
        in_halves: Each half of a head is rotated on its own.
    """

    index: torch.Tensor
    cos_sin: torch.Tensor
    function: Rotate
    in_halves: bool = False

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates query and key [T, heads, head_size]. The order of their elements may change, alike for both.

        Their storage may be reused; rows may be strided.
        """
        if self.in_halves:
            query, key = _first_quarters_first(query), _first_quarters_first(key)
        return self.function(self.index, query, key, self.cos_sin)


def _first_quarters_first(x: torch.Tensor) -> torch.Tensor:
    """A copy, in which element i is rotated with element i + head_size / 2.

    before    a0 b0 | a1 b1        a rotates with b, in each half of a head
    after     a0 a1 | b0 b1
    """
    return x.unflatten(-1, (2, 2, -1)).transpose(-2, -3).flatten(-3)


def positions_of_image(size: Size) -> torch.Tensor:
    """Row and column of each patch of an image: float32 [rows * columns, 2], on the host."""
    rows, columns = size
    row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    return torch.stack((row, column), dim=-1).float()


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
    """Makes the angles of patches, and keeps those of recent sizes of images.

    Args:
        ctx: Build context of the tower.
        head_size: Elements per head, a multiple of 4.
        frequencies: float32 [2, head_size / 4]: those of rows, and those of columns.
        in_halves: As in AxialAngles.
    """

    def __init__(
        self, ctx: BuildContext, head_size: int, frequencies: torch.Tensor, *, in_halves: bool = False
    ) -> None:
        self._function = ctx.op("rotary_embedding", head_size=head_size, rotary_dim=head_size).function
        self._frequencies, self._device, self._in_halves = frequencies, ctx.device, in_halves
        self._kept: OrderedDict[Size, torch.Tensor] = OrderedDict()

    def angles(self, positions: torch.Tensor) -> AxialAngles:
        """The angles of patches at these positions, float32 [T, 2] on the host: row and column."""
        index = torch.arange(len(positions), dtype=torch.int32, device=self._device)
        return AxialAngles(index, self._cos_sin(positions), self._function, self._in_halves)

    def angles_of_images(
        self, sizes: Sequence[Size], positions: Callable[[Size], torch.Tensor], order: torch.Tensor | None = None
    ) -> AxialAngles:
        """The angles of the patches of several images or frames.

        Args:
            sizes: Of each.
            positions: The positions in an image of this size, as `angles` takes them.
            order: int64 [T], host: the patch of all of them that stands at each place; None for their own order.
        """
        firsts: dict[Size, int] = {}
        tables, count = [], 0
        for size in dict.fromkeys(sizes):
            tables.append(self._table(size, positions))
            firsts[size], count = count, count + len(tables[-1])
        places = [torch.arange(first := firsts[size], first + size[0] * size[1], dtype=torch.int32) for size in sizes]
        index = places[0] if len(places) == 1 else torch.cat(places)
        index = index if order is None else index[order]
        cos_sin = tables[0] if len(tables) == 1 else torch.cat(tables)
        return AxialAngles(index.to(self._device), cos_sin, self._function, self._in_halves)

    def _table(self, size: Size, positions: Callable[[Size], torch.Tensor]) -> torch.Tensor:
        found = self._kept.pop(size, None)
        self._kept[size] = found = self._cos_sin(positions(size)) if found is None else found
        excess = sum(map(len, self._kept.values())) - CACHED_ROWS
        while excess > 0 and len(self._kept) > 1:
            excess -= len(self._kept.popitem(last=False)[1])
        return found

    def _cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        turned = torch.cat([positions[:, i : i + 1] * self._frequencies[i] for i in range(2)], dim=-1)
        return torch.cat((turned.cos(), turned.sin()), dim=-1).to(self._device)
