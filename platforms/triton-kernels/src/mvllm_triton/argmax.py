"""Argmax of each row."""

from __future__ import annotations

import torch

from mvllm_triton.kernels import argmax as kernels
from mvllm_triton.tiles import argmax_piece, power_of_two


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest element of each row, and its index.

    Args:
        x: [n, size], size >= 1; rows may be strided. A NaN is larger than any number.

    Returns:
        Elements [n], x's dtype, and their indices, int64 [n]; the first of equal elements.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, size = x.shape
    values = torch.empty(num_rows, dtype=x.dtype, device=x.device)
    places = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    if num_rows == 0:
        return values, places
    piece, block = argmax_piece(num_rows, size)
    num_pieces = -(-size // piece)
    found = torch.empty((num_rows, num_pieces), dtype=torch.int64, device=x.device)
    kernels.argmax_partial[(num_rows, num_pieces)](
        found, x, x.stride(0), size, num_pieces, piece, BLOCK=block, num_warps=4
    )
    kernels.argmax_reduce[(num_rows,)](
        values, places, found, x, x.stride(0), num_pieces, PAD=power_of_two(-(-size // block)), num_warps=1
    )
    return values, places
