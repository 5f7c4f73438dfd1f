"""Reference implementations of the ops `linear` and `linear_silu_and_mul` (linear fused with SwiGLU activation)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.activation import silu_and_mul
from mvllm.ops.schema import OpSchema


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias.

    Args:
        x: [..., in_features], compute dtype.
        weight: [out_features, in_features], compute dtype, or the result of the provider's `prepare`.
        bias: [out_features] or None, compute dtype.

    Returns:
        [..., out_features], compute dtype.
    """
    return F.linear(x, weight, bias)


def linear_silu_and_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """SwiGLU projection: silu of the first half of x · weightᵀ + bias, times the second half.

    Layers call it instead of `linear` and `silu_and_mul` if a provider other than this reference implements it.

    Args:
        x: [..., in_features], compute dtype.
        weight: [2 · size, in_features], compute dtype, gate rows first, or the result of the provider's `prepare`.
        bias: [2 · size] or None, compute dtype.

    Returns:
        [..., size], compute dtype. The product may be rounded to the compute dtype before the activation.
    """
    return silu_and_mul(linear(x, weight, bias))


LINEAR_SILU_AND_MUL = OpSchema(
    linear_silu_and_mul,
    facts={
        "in_features": "columns of the weight on this rank",
        "size": "half of the weight's rows on this rank",
        "bias": "whether a bias is added",
    },
    replaces_others=True,
)

LINEAR = OpSchema(
    linear,
    facts={
        "in_features": "columns of the weight on this rank",
        "out_features": "rows of the weight on this rank",
        "bias": "whether a bias is added",
    },
)
