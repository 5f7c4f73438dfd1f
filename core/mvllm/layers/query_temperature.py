"""QueryTemperature: the factor on queries of layers without positional encoding, which grows with the position.

Source: Scalable-Softmax, arXiv:2501.19399, in the form of Llama 4.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from mvllm.layers.context import BuildContext


class QueryTemperature(nn.Module):
    """Multiplies the queries of position p by 1 + scale · ln(1 + floor((p + 1) / floor_scale)). All layers share it.

    Args:
        ctx: Build context.
        scale, floor_scale: As above.
        max_len: Upper bound of positions.
    """

    def __init__(self, ctx: BuildContext, scale: float, floor_scale: float, max_len: int) -> None:
        super().__init__()
        self._scale, self._floor_scale, self._max_len = scale, floor_scale, max_len
        self._device = ctx.device
        # In float32, as in the reference implementation: rounded factors would be equal at many positions.
        self._lookup = ctx.floats(torch.float32).op("embedding", num_embeddings=max_len, embedding_dim=1).function

    def forward(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries [T, heads, head_size] times the factors of positions [T]."""
        factors: torch.Tensor = self._lookup(positions, self._table)
        return (query.float() * factors.unsqueeze(2)).to(query.dtype)

    def prepare_weights(self) -> None:
        """Allocates the table, after the weights have been loaded."""
        self._table  # noqa: B018  (cached)

    # Not a buffer: casting a module's dtype must not touch the table.
    @cached_property
    def _table(self) -> torch.Tensor:
        """[max_len, 1] float32: the factor of each position."""
        steps = torch.floor((torch.arange(self._max_len).float() + 1.0) / self._floor_scale)
        return (torch.log1p(steps) * self._scale + 1.0).unsqueeze(1).to(self._device)
