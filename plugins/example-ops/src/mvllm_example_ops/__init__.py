"""Example op providers, for any platform with torch tensors.

mvllm ops --op-providers torch-norms                       shows where they would run
mvllm generate --op-providers torch-norms ...              runs them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.extension_api import OpCase, OpProvider

if TYPE_CHECKING:
    import torch


def providers() -> Sequence[OpProvider]:
    """The function of the entry point, called in each worker of an engine with op provider `torch-norms`."""
    return (OpProvider(op="rms_norm", name="torch-rms-norm", function=rms_norm, supports=supports, priority=10),)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """torch's fused norm; the reference needs five operations."""
    import torch.nn.functional as F

    return F.rms_norm(x, weight.shape, weight, eps)


def supports(case: OpCase) -> list[str]:
    """Unsupported in half precision, where torch rounds at another place than the reference."""
    return [] if case.dtype == "float32" else [f"computes in float32, not {case.dtype}"]
