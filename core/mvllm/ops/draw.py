"""Random draws from a discrete distribution over the vocabulary, given by weights.

Running sums over 128 000 float32 numbers lose the small ones. So the vocabulary is divided into about sqrt(vocab)
blocks and the draw has two steps, each over a few hundred numbers with its own uniform number: first the block, by its
share of the total, then the token, by its share of the block. The product of both shares is the token's probability.
Both uniform numbers are hashes of a seed and a position, computed on the host, so equal weights and blocks give the
same token on every device.

    weights   | .1 .0 .3 | .0 .0 .2 | .4 .0 .0 |      coarse = 0.7: blocks sum to .4 .2 .4, so the last block
                                       ^^              fine decides within it
"""

from __future__ import annotations

import torch

from mvllm.ops.schema import OpSchema


def draw(
    weights: torch.Tensor, coarse: torch.Tensor, fine: torch.Tensor, block_size: int | None = None
) -> torch.Tensor:
    """Draws one token per row.

    Args:
        weights: float32 [n, vocab], >= 0, with a positive and finite sum in each row; need not add up to 1.
        coarse, fine: float32 [n]; independent uniforms in [0, 1).
        block_size: Tokens of a block; None for `draw_block` of the vocabulary's size.

    Returns:
        int64 [n]; never a token of weight 0. For a row whose weights have no positive finite sum, any token.
    """
    num_rows, vocab_size = weights.shape
    block_size = draw_block(vocab_size) if block_size is None else block_size
    padding = -vocab_size % block_size
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(num_rows, -1, block_size)
    block = _invert(blocks.sum(dim=-1), coarse)
    within = blocks.gather(1, block.view(-1, 1, 1).expand(-1, 1, block_size)).squeeze(1)
    token = block * block_size + _invert(within, fine)
    return token.clamp_(max=vocab_size - 1)


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
    """Draws one token per row after min_p, top_k and top_p filtering.

    A token is kept if its logit is at least the peak plus `min_p_gap` and at least the top_k-th largest logit, and if
    it is among the most probable of these tokens that make up top_p of their mass. Tokens that tie with the last kept
    one are kept too. The weight of a kept token is exp((logit - peak) · inv_temperature).

    The vocabulary is divided into blocks of `block_size` tokens, in order. The selected block is the first of positive
    weight at which the running sum of the blocks' weights exceeds `coarse` times their total; the token is selected
    likewise by `fine` within the block. Sums are float32 in any order, so implementations may draw different tokens
    only if a uniform number is within the rounding error of a boundary.

    Args:
        logits: [n, vocab], float32; the last dimension is contiguous.
        peaks: [n], float32: the largest logit of each row.
        inv_temperature: [n], float32: 1 / temperature.
        min_p_gap: [n], float32, <= 0; -inf where min_p is off.
        top_k: [n], int64, from 1 to vocab; vocab where it is off.
        top_p: [n], float32; 1 where it is off.
        coarse, fine: [n], float32; independent uniforms in [0, 1).
        block_size: Tokens of a block, a power of two.

    Returns:
        int64 [n]; never a token that was filtered out. For a row without a finite largest logit, any of the vocabulary.
        A row's token does not depend on the other rows.
    """
    values = logits.sort(dim=1, descending=True).values
    weights = ((values - peaks[:, None]) * inv_temperature[:, None]).exp()
    kth = values.gather(1, top_k[:, None] - 1)
    lowest = torch.maximum(kth, (peaks + min_p_gap)[:, None])
    sums = torch.where(values >= lowest, weights, 0.0).cumsum(dim=1)
    last = (sums < top_p[:, None] * sums[:, -1:]).sum(dim=1, keepdim=True).clamp(max=logits.shape[1] - 1)
    lowest = torch.where(top_p[:, None] < 1, torch.maximum(lowest, values.gather(1, last)), lowest)
    weights = ((logits - peaks[:, None]) * inv_temperature[:, None]).exp()
    return draw(torch.where(logits >= lowest, weights, 0.0), coarse, fine, block_size)


FILTERED_DRAW = OpSchema(filtered_draw, facts={"size": "tokens in a row of logits"})
"""Resolved in the compute dtype like the others, although its logits are float32."""


def draw_block(vocab_size: int) -> int:
    """A power of two near the square root, or somewhat smaller if that avoids padding, which needs a copy."""
    size = 1 << (vocab_size.bit_length() + 1) // 2
    return next((s for s in (size, size // 2, size // 4) if s and vocab_size % s == 0), size)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Returns the first index of each row with positive weight at which the running sum exceeds `uniform` of the total.

    The total is the largest running sum at a positive weight, so that such an index exists for any rounding: devices
    that compute sums in parallel may give running sums that are not monotone.
    """
    size = weights.shape[1]
    sums = weights.cumsum(dim=1).masked_fill_(weights <= 0, 0.0)
    target = sums.amax(dim=1) * uniform
    indices = torch.arange(size, device=weights.device)
    return torch.where(sums > target.unsqueeze(1), indices, size - 1).amin(dim=1)
