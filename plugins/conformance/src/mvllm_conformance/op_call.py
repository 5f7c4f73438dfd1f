"""OpCall: one test case of an operation, with its arguments and the properties that `supports` checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ROWS = (1, 3, 17)


@dataclass(frozen=True)
class OpCall:
    """Test case: one call of one operation.

    Attributes:
        op: Name of the operation.
        facts: Properties of the call (sizes, flags) that a layer passes to the provider's `supports`.
        make: Creates the arguments, on the CPU.
        weight: Index of the weight argument that the provider's `prepare` converts; a tuple of several, or None.
    """

    op: str
    facts: dict[str, Any]
    make: Callable[[], tuple[Any, ...]]
    weight: int | tuple[int, ...] | None = None

    def __str__(self) -> str:
        shapes = [tuple(a.shape) for a in self.make() if isinstance(a, torch.Tensor)]
        return f"{self.op} {self.facts} on {shapes}"


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed values; equal arguments give equal tensors."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
