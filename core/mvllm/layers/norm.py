"""Norms. Every rank holds the whole weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.weight_target import WeightTarget


def whole(name: str, parameter: nn.Parameter) -> tuple[str, WeightTarget]:
    """The target of a parameter that takes all of one checkpoint tensor."""
    everything = tuple(slice(0, size) for size in parameter.shape)
    return name, WeightTarget(parameter, tuple(parameter.shape), everything, everything)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
    """

    def __init__(self, ctx: BuildContext, name: str, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = ctx.parameter(hidden_size)
        self._norm = ctx.op("rms_norm", hidden_size=hidden_size).function
        self._add_norm = ctx.op("fused_add_rms_norm", hidden_size=hidden_size).function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size], normalised."""
        return self._norm(x, self.weight, self.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds `x` to the residual stream (which begins with it when None); returns the normalised sum and the sum.

        The storage of `x` and `residual` may be reused.
        """
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        return self._add_norm(x, residual, self.weight, self.eps)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and what this rank takes of them."""
        yield whole(f"{self.name}.weight", self.weight)


class LayerNorm(nn.Module):
    """Layer norm over the last dimension.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size: Size of the last dimension.
        eps: Added to the variance.
        affine: Whether there are weight and bias.
    """

    def __init__(self, ctx: BuildContext, name: str, hidden_size: int, eps: float, *, affine: bool = True) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = ctx.parameter(hidden_size) if affine else None
        self.bias = ctx.parameter(hidden_size) if affine else None
        self._norm = ctx.op("layer_norm", hidden_size=hidden_size, affine=affine).function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size], normalised."""
        return self._norm(x, self.weight, self.bias, self.eps)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and what this rank takes of them."""
        if self.weight is not None and self.bias is not None:
            yield whole(f"{self.name}.weight", self.weight)
            yield whole(f"{self.name}.bias", self.bias)
