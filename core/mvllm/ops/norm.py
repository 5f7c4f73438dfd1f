"""The operations `rms_norm`, `layer_norm`, and both behind a sum, over the last dimension, computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x divided by its root mean square, times weight.

    Args:
        x: [..., hidden_size], compute dtype; leading dimensions may be strided, the last is contiguous.
        weight: [hidden_size], compute dtype.
        eps: Added to the mean square.

    Returns:
        Shape and dtype of `x`. The normalised value is rounded to the compute dtype before the product with `weight`.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual stream and normalises the sum.

    Args:
        x, residual: [T, hidden_size], compute dtype, contiguous.
        weight: [hidden_size], compute dtype.
        eps: Added to the mean square.

    Returns:
        The normalised sum, and the sum itself rounded to the compute dtype; both [T, hidden_size].
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / standard deviation, times weight, plus bias.

    Args:
        x: [T, hidden_size], compute dtype.
        weight, bias: [hidden_size], compute dtype, or None for a norm without them.
        eps: Added to the variance.

    Returns:
        Shape and dtype of `x`.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def fused_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual stream and normalises the sum, as `layer_norm` does.

    Layers call it instead of a sum and `layer_norm` if a provider other than this reference implements it.

    Args:
        x, residual: [T, hidden_size], compute dtype, contiguous.
        weight, bias: [hidden_size], compute dtype, or None for a norm without them.
        eps: Added to the variance.

    Returns:
        The normalised sum, and the sum itself rounded to the compute dtype; both [T, hidden_size].
    """
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual


_HIDDEN_SIZE = {"hidden_size": "size of the last dimension"}

RMS_NORM = OpSchema(rms_norm, facts=_HIDDEN_SIZE)
FUSED_ADD_RMS_NORM = OpSchema(fused_add_rms_norm, facts=_HIDDEN_SIZE, may_overwrite=("x", "residual"))
_OF_LAYER_NORM = {**_HIDDEN_SIZE, "affine": "whether weight and bias are given"}
LAYER_NORM = OpSchema(layer_norm, facts=_OF_LAYER_NORM)
FUSED_ADD_LAYER_NORM = OpSchema(
    fused_add_layer_norm, facts=_OF_LAYER_NORM, may_overwrite=("x", "residual"), replaces_others=True
)
