"""Token sampling from logits with min_p, top_k and top_p, without a sort; see kernels/sampling.py.

The number of launches and their grids depend on shapes only; the host reads no tensor.
"""

from __future__ import annotations

import torch

from mvllm_triton.argmax import argmax
from mvllm_triton.kernels import sampling as kernels
from mvllm_triton.tiles import histogram_tiles, power_of_two, sampled_block


def sample(
    logits: torch.Tensor,
    inv_temperature: torch.Tensor,
    min_p_gap: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    coarse: torch.Tensor,
    fine: torch.Tensor,
    *,
    peaks: torch.Tensor | None = None,
    block_size: int | None = None,
) -> torch.Tensor:
    """Samples one token per row.

    A token is kept if its logit is at least the row maximum plus `min_p_gap` and at least the top_k-th largest logit,
    and if it is among the most probable of these tokens, which hold top_p of their mass. Tokens that tie with the last
    one are kept, too.

    Args:
        logits: float32 [n, vocab]; the last dimension is contiguous.
        inv_temperature: float32 [n]: 1 / temperature.
        min_p_gap: float32 [n], <= 0: temperature * ln(min_p); -inf disables min_p.
        top_k: int32 or int64 [n], from 1 to vocab; vocab disables it.
        top_p: float32 [n]; 1 disables it.
        coarse, fine: float32 [n]; independent uniforms in [0, 1): the first selects a block of tokens, the second a
            token of the block.
        peaks: float32 [n]: the largest logit of each row, if known.
        block_size: Tokens of a block, a power of two; None for `tiles.sampled_block`.

    Returns:
        int64 [n]; never a token that was filtered out. For a row without a finite largest logit, any token.
    """
    num_rows, size = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    peaks, thresholds = filters(logits, inv_temperature, min_p_gap, top_k, top_p, peaks)
    block = sampled_block(size) if block_size is None else block_size
    num_blocks = -(-size // block)
    sums = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    row = (logits, logits.stride(0), peaks, thresholds, inv_temperature, size)
    kernels.sampling_block_sums[(num_rows, num_blocks)](sums, *row, BLOCK=block, num_warps=1)
    kernels.sample_tokens[(num_rows,)](
        tokens, sums, coarse, fine, *row, num_blocks, BLOCKS_PAD=power_of_two(num_blocks), BLOCK=block, num_warps=1
    )
    return tokens


def filtered_draw(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    inv_temperature: torch.Tensor,
    min_p_gap: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    coarse: torch.Tensor,
    fine: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """`sample` with the signature of core's op: row maxima and block size are given."""
    settings = inv_temperature, min_p_gap, top_k, top_p
    return sample(logits, *settings, coarse, fine, peaks=peaks, block_size=block_size)


def filters(
    logits: torch.Tensor,
    inv_temperature: torch.Tensor,
    min_p_gap: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    peaks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row, float32 [n], and the order of its smallest kept logit, int32 [n].

    The order of a logit is an integer that compares as the logit does: the logit's bits, all but the sign inverted for
    negative logits. The arguments are those of `sample`.
    """
    num_rows, size = logits.shape
    device = logits.device
    thresholds = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows == 0:
        return torch.empty(0, dtype=torch.float32, device=device), thresholds
    peaks = argmax(logits)[0] if peaks is None else peaks
    tiles = histogram_tiles(num_rows, size)
    digits = kernels.DIGITS.value
    counts = torch.zeros((num_rows, tiles.copies + 2, digits), dtype=torch.int32, device=device)
    weights = torch.zeros((num_rows, tiles.copies + 4, digits), dtype=torch.int64, device=device)
    states = torch.empty((num_rows, kernels.LEVELS.value, kernels.STATE.value), dtype=torch.int64, device=device)
    for level in range(kernels.LEVELS.value):
        kernels.top_k_top_p_histogram[(num_rows, -(-size // tiles.piece))](
            counts, weights, states, logits, logits.stride(0), peaks, inv_temperature, min_p_gap, top_k, top_p, size,
            tiles.copies, tiles.piece,
            LEVEL=level,
            BLOCK=tiles.block,
            num_warps=4,
        )  # fmt: skip
    kernels.top_k_top_p_threshold[(num_rows,)](
        thresholds, counts, weights, states, peaks, min_p_gap, top_k, top_p, size, tiles.copies, num_warps=4
    )
    return peaks, thresholds
