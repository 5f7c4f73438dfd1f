"""WeightTarget: the parameter slice that a slice of a checkpoint tensor fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class WeightTarget:
    """One rectangle of one checkpoint tensor, and the rectangle of a parameter that it fills.

        checkpoint tensor, source_shape            parameter
        ┌──────────────────────────┐               ┌──────────────┐
        │        ┌────────┐        │    .T if      │ ┌──────────┐ │
        │        │ source │        │  transpose    │ │  desti-  │ │
        │        └────────┘        │  ─────────▶   │ │  nation  │ │
        └──────────────────────────┘               └─┴──────────┴─┘

    Attributes:
        parameter: The parameter; several checkpoint tensors may fill it.
        source_shape: Required shape of the whole checkpoint tensor.
        source: The part that this rank uses, one slice with start and stop per dimension. A slice with a step reads the
            elements in between as well.
        destination: The part of the parameter that it fills, likewise; an integer selects a matrix of a stack, None
            makes a stack of one matrix.
        transpose: The checkpoint stores the matrix, or each of a stack, as [in, out]; the parameter is [out, in].
    """

    parameter: nn.Parameter
    source_shape: tuple[int, ...]
    source: tuple[slice, ...]
    destination: tuple[slice | int | None, ...]
    transpose: bool = False


def whole(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The slices of a whole tensor."""
    return tuple(slice(0, size) for size in tensor.shape)


def whole_tensor_target(name: str, parameter: nn.Parameter) -> tuple[str, WeightTarget]:
    """The target of a parameter that one whole checkpoint tensor fills."""
    return name, WeightTarget(parameter, tuple(parameter.shape), whole(parameter), whole(parameter))
