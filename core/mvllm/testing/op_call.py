"""What one call of one operation is, and what its cases are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ROWS = (1, 3, 17)


@dataclass(frozen=True)
class OpCall:
    """One call of one operation.

    Attributes:
        op: Its name.
        facts: As a layer states them.
        make: Makes the arguments, on the host.
        weight: Position of the weight that a provider's `prepare` takes, or positions of all that it takes, or None.
    """

    op: str
    facts: dict[str, Any]
    make: Callable[[], tuple[Any, ...]]
    weight: int | tuple[int, ...] | None = None

    def __str__(self) -> str:
        shapes = [tuple(a.shape) for a in self.make() if isinstance(a, torch.Tensor)]
        return f"{self.op} {self.facts} on {shapes}"


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed; the same for the same arguments."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
