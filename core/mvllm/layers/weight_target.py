"""Where a tensor of the checkpoint goes on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class WeightTarget:
    """One rectangle of one checkpoint tensor, and the place in a parameter that it fills.

        checkpoint tensor, source_shape            parameter
        ┌──────────────────────────┐               ┌──────────────┐
        │        ┌────────┐        │    .T if      │ ┌──────────┐ │
        │        │ source │        │  transpose    │ │  desti-  │ │
        │        └────────┘        │  ─────────▶   │ │  nation  │ │
        └──────────────────────────┘               └─┴──────────┴─┘

    Attributes:
        parameter: What is filled; it may take parts of several checkpoint tensors.
        source_shape: Shape that the whole checkpoint tensor must have.
        source: What this rank reads of it, one slice with start and stop per dimension; one with a step reads what lies
            between as well.
        destination: Where that goes in the parameter, likewise; an integer picks a matrix out of a stack.
        transpose: The checkpoint stores the matrix, or each of a stack, as [in, out]; the parameter is [out, in].
    """

    parameter: nn.Parameter
    source_shape: tuple[int, ...]
    source: tuple[slice, ...]
    destination: tuple[slice | int, ...]
    transpose: bool = False
