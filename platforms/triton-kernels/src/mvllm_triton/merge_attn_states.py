"""Merges attention over two sets of keys into attention over both."""

from __future__ import annotations

import torch

from mvllm_triton.kernels import merge_attn_states as kernels
from mvllm_triton.tiles import power_of_two, write_heads


def merge_attn_states(
    out: torch.Tensor,
    first: torch.Tensor,
    first_sums: torch.Tensor,
    second: torch.Tensor,
    second_sums: torch.Tensor,
) -> None:
    """Stores the attention over all keys, given those over two sets of keys without a common one.

    Args:
        out: [T, heads, size]; the last dimension is contiguous, as in `first` and `second`.
        first, second: Likewise: attention over each set.
        first_sums, second_sums: float32 [heads, T]: natural logarithms of the sums of exponentials of the scores. Rows
            are contiguous.

    Source: FlashAttention, arXiv:2205.14135.
    """
    num_tokens, num_heads, size = out.shape
    pad = power_of_two(size)
    heads = write_heads(num_heads, pad)
    kernels.merge_attn_states[(num_tokens, -(-num_heads // heads))](
        out, first, first_sums, second, second_sums,
        *out.stride()[:2], *first.stride()[:2], *second.stride()[:2], first_sums.stride(0), second_sums.stride(0),
        num_heads,
        HEADS=heads,
        SIZE=size,
        PAD=pad,
    )  # fmt: skip
