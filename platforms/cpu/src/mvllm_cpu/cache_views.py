"""Views of a layer's KV cache by block, token and head, for the conformance suite; steps do not use them.

The layout is that of `csrc/kernels.h`: tokens of keys are adjacent, dimensions of values are adjacent, and both are in
pairs if the storage dtype is bfloat16 or has 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_PAIRED = (torch.bfloat16, torch.int8, torch.uint8)
ONE = {torch.int8: 1, torch.uint8: 0x38}
"""The code of the number 1, by storage dtype: int8, and float8_e4m3fn stored as uint8."""


def key_views(part: torch.Tensor, size: int) -> list[torch.Tensor]:
    """[num_blocks, block_size, num_kv_heads, n] views of keys: all dimensions, or the even ones and the odd ones.

    Args:
        part: [num_blocks, num_kv_heads, padded size, block_size] as allocated.
        size: Elements of a key without padding.
    """
    if part.dtype not in _PAIRED:
        return [part[:, :, :size].permute(0, 3, 1, 2)]
    pairs = part.view(*part.shape[:2], part.shape[2] // 2, part.shape[3], 2)
    return [pairs[:, :, : (size + 1 - odd) // 2, :, odd].permute(0, 3, 1, 2) for odd in (0, 1)]


def value_view(part: torch.Tensor, size: int) -> torch.Tensor:
    """A view [num_blocks, block_size // n, n, num_kv_heads, size] of values; n is 2 if values are in pairs, else 1.

    Args:
        part: [num_blocks, num_kv_heads, padded size, block_size] as allocated.
        size: Elements of a value without padding.
    """
    num_blocks, num_heads, padded, block_size = part.shape
    n = 2 if part.dtype in _PAIRED else 1
    return part.view(num_blocks, num_heads, block_size // n, padded, n)[..., :size, :].permute(0, 2, 4, 1, 3)


def read_key(part: torch.Tensor, size: int, blocks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Keys [n, num_kv_heads, size] of the tokens with these block ids and offsets in the block."""
    read = [view[blocks, tokens] for view in key_views(part, size)]
    if len(read) == 1:
        return read[0]
    joined = torch.empty(*read[0].shape[:2], size, dtype=part.dtype)
    joined[..., 0::2], joined[..., 1::2] = read
    return joined


def read_value(part: torch.Tensor, size: int, blocks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Values [n, num_kv_heads, size] of the tokens with these block ids and offsets in the block."""
    view = value_view(part, size)
    n = view.shape[2]
    return view[blocks, tokens // n, tokens % n]


def read_scales(part: torch.Tensor, blocks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Scales [n, num_kv_heads] of these tokens from `part`, [num_blocks, num_kv_heads, block_size]."""
    return part.transpose(1, 2)[blocks, tokens]


def fill(views: Sequence[torch.Tensor], value: float) -> None:
    """Sets all elements to `value`; 8-bit codes to the code of 1, since scales are set to `value`."""
    for view in views:
        view.fill_(ONE.get(view.dtype, value))
