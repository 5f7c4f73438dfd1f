"""Gated activations: an activation of the first half of each row, times the second half.

All take [..., 2 * size] and return [..., size] of the same dtype. The activation is rounded before the product, as two
separate operations would do.
"""

from __future__ import annotations

import torch

from mvllm_triton.kernels import activation as kernels
from mvllm_triton.tiles import power_of_two


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half times the second half: [..., 2 * size] to [..., size]."""
    return _act_and_mul(x, 0)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu, with the exact normal distribution, of the first half times the second half."""
    return _act_and_mul(x, 1)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of gelu of the first half times the second half."""
    return _act_and_mul(x, 2)


def _act_and_mul(x: torch.Tensor, function: int) -> torch.Tensor:
    size = x.shape[-1] // 2
    rows = x.reshape(-1, 2 * size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(1024, power_of_two(size))
        kernels.act_and_mul[(rows.shape[0], -(-size // block))](
            out, rows, rows.stride(0), size, FUNCTION=function, BLOCK=block, num_warps=max(1, block // 256)
        )
    return out
