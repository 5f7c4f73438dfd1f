"""Matrix product with a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias.

    Args:
        x: [..., in_features], compute dtype.
        weight: [out_features, in_features], or what the provider's `prepare` made of it.
        bias: [out_features] or None.

    Returns:
        [..., out_features], compute dtype.
    """
    return F.linear(x, weight, bias)


LINEAR = OpSchema(
    linear,
    facts={
        "in_features": "columns of the weight on this rank",
        "out_features": "rows of the weight on this rank",
        "bias": "whether a bias is added",
    },
)
