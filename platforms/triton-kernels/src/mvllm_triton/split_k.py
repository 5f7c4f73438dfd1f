"""Adds the partial results of products that are split along their inner dimension."""

from __future__ import annotations

import torch

from mvllm_triton.kernels import split_k as kernels

_BLOCK = 1024


def partial_results(out: torch.Tensor, num_splits: int) -> torch.Tensor:
    """What programs write to: `out` with one split, else float32 [num_splits, *out.shape]."""
    if num_splits == 1:
        return out
    return torch.empty((num_splits, *out.shape), dtype=torch.float32, device=out.device)


def splitk_reduce(out: torch.Tensor, parts: torch.Tensor) -> None:
    """Stores the sum of `parts`, added in the order of the splits, in `out`, if it has partial results."""
    if parts is not out:
        size = out.numel()
        kernels.splitk_reduce[(-(-size // _BLOCK),)](out, parts, size, SPLITS=len(parts), BLOCK=_BLOCK, num_warps=4)
