"""Products of 8-bit floats by torch's library, `torch._scaled_mm`, where the device has it.

    per tensor   static inputs, and a weight with one scale: both scales have one element
    per row      otherwise: scales [rows, 1] of the inputs and [1, out_features] of the weight

The library takes inputs [rows, in_features] in row-major and the weight as [in_features, out_features] in column-major
order, which is the transpose of our layout, and sizes of the weight that are multiples of 16. It has neither every
layout of scales for every device, nor every result dtype, and says so by raising. So each combination is tried once,
with numbers whose products are known, when a weight is packed.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch

DTYPES = (torch.bfloat16, torch.float16)
"""Result dtypes. Products with more bits than these are computed by our kernel."""

MULTIPLE = 16
"""What the library requires the sizes of a weight to be a multiple of."""

Combination = tuple[torch.dtype, bool]
"""The dtype of results, and whether there is a bias."""


def supported(weight: torch.Tensor, *, per_tensor: bool) -> frozenset[Combination]:
    """The combinations that the library computes with a weight on its device.

    Args:
        weight: [out_features, in_features], a float8 dtype that the device multiplies.
        per_tensor: Which of the two layouts of scales it has.
    """
    if any(size % MULTIPLE for size in weight.shape):
        return frozenset()
    pairs = product(DTYPES, (False, True))
    return frozenset(pair for pair in pairs if _works(weight.device, weight.dtype, per_tensor, *pair))


def multiply(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """codes · weightᵀ, times both scales, + bias, rounded once.

    Args:
        codes: [rows, in_features], the weight's dtype.
        scale: float32, [1] or [rows, 1].
        weight: [out_features, in_features].
        weight_scale: float32, [1] if `scale` is, else [1, out_features].
        bias: [out_features], of `dtype`, or None.
        dtype: The result's dtype.

    Returns:
        [rows, out_features].
    """
    result: torch.Tensor = torch._scaled_mm(
        codes, weight.t(), scale_a=scale, scale_b=weight_scale, bias=bias, out_dtype=dtype, use_fast_accum=True
    )
    return result


@cache
def _works(device: torch.device, float8: torch.dtype, per_tensor: bool, dtype: torch.dtype, has_bias: bool) -> bool:
    """Whether the library raises nothing and is right, for one combination."""
    rows, size, out = 5, 64, 48
    numbers = torch.arange(-8, 8, device=device).float() / 4  # exact in every format, and so are sums of products
    x = numbers[(torch.arange(rows * size, device=device) * 7) % 16].view(rows, size)
    w = numbers[(torch.arange(out * size, device=device) * 5) % 16].view(out, size)
    bias = torch.arange(out, device=device).to(dtype) if has_bias else None
    scale = torch.full((1,) if per_tensor else (rows, 1), 0.5, device=device)
    weight_scale = torch.full((1,) if per_tensor else (1, out), 0.25, device=device)
    expected = x @ w.t() / 8 + (0 if bias is None else bias.float())
    try:
        found = multiply(x.to(float8), scale, w.to(float8), weight_scale, bias, dtype)
        return bool((found.float() - expected).abs().max() <= 0.01 * expected.abs().max())
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):
        return False  # our kernel multiplies
