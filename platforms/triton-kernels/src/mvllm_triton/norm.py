"""RMS norms."""

from __future__ import annotations

import torch

from mvllm_triton.kernels import norm as kernels
from mvllm_triton.tiles import power_of_two, row_tiles


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x divided by its root mean square, times weight; computed in float32, rounded to x's dtype before the product.

    Args:
        x: [..., hidden_size]; the last dimension is contiguous, leading ones may be strided.
        weight: [hidden_size].
        eps: Added to the mean square.

    Returns:
        Shape and dtype of `x`, contiguous.
    """
    size = x.shape[-1]
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    if x.dim() == 3:  # heads, perhaps a slice of a wider tensor
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    else:
        rows = x.reshape(-1, size)
        x, inner, outer_stride, inner_stride = rows, 1, rows.stride(0), 0
    num_rows = out.numel() // size
    pad = power_of_two(size)
    tiles = row_tiles(pad)
    kernels.rms_norm[(-(-num_rows // tiles.rows),)](
        out, x, weight, eps, num_rows, outer_stride, inner_stride,
        INNER=inner,
        SIZE=size,
        PAD=pad,
        ROWS=tiles.rows,
        num_warps=tiles.num_warps,
    )  # fmt: skip
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the residual stream and normalizes the sum, both in place.

    Args:
        x, residual: [T, hidden_size], contiguous; overwritten.
        weight: [hidden_size].
        eps: Added to the mean square.

    Returns:
        The normalized sum, stored in `x`, and the sum rounded to their dtype, stored in `residual`.
    """
    x, residual = x.contiguous(), residual.contiguous()
    size = x.shape[-1]
    num_rows = x.numel() // size if size else 0
    if num_rows == 0:
        return x, residual
    pad = power_of_two(size)
    tiles = row_tiles(pad)
    kernels.fused_add_rms_norm[(-(-num_rows // tiles.rows),)](
        x, residual, weight, eps, num_rows, SIZE=size, PAD=pad, ROWS=tiles.rows, num_warps=tiles.num_warps
    )
    return x, residual
