"""Draws from a discrete distribution given by weights, over vocabularies of any size.

Running sums over 128 000 float32 numbers lose the small ones. So the vocabulary is cut into about sqrt(vocab) blocks
and the draw is made in two steps, each over a few hundred numbers and with a uniform of its own: first the block, by
its share of the total, then the token, by its share of the block. The product of both is the token's probability.

    weights   | .1 .0 .3 | .0 .0 .2 | .4 .0 .0 |      coarse = 0.7: blocks sum to .4 .2 .4, so the last block
                                       ^^              fine decides within it
"""

from __future__ import annotations

import torch


def draw(weights: torch.Tensor, coarse: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
    """Draws one token per row.

    Args:
        weights: float32 [n, vocab], >= 0, with a positive and finite sum in each row; need not add up to 1.
        coarse, fine: float32 [n]; independent uniforms in [0, 1).

    Returns:
        int64 [n]; never a token of weight 0. For a row whose weights have no positive finite sum, any token.
    """
    num_rows, vocab_size = weights.shape
    block_size = _block_size(vocab_size)
    padding = -vocab_size % block_size
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(num_rows, -1, block_size)
    block = _invert(blocks.sum(dim=-1), coarse)
    within = blocks.gather(1, block.view(-1, 1, 1).expand(-1, 1, block_size)).squeeze(1)
    token = block * block_size + _invert(within, fine)
    return token.clamp_(max=vocab_size - 1)


def _block_size(vocab_size: int) -> int:
    """A power of two near the square root, somewhat smaller where that saves padding, which would be a copy."""
    size = 1 << (vocab_size.bit_length() + 1) // 2
    return next((s for s in (size, size // 2, size // 4) if s and vocab_size % s == 0), size)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Returns the first index of each row with positive weight at which the running sum exceeds `uniform` of the total.

    The total is the largest running sum at a positive weight, so that such an index exists however sums are rounded:
    some devices compute them in parallel, and then they need not even be monotone.
    """
    size = weights.shape[1]
    sums = weights.cumsum(dim=1).masked_fill_(weights <= 0, 0.0)
    target = sums.amax(dim=1) * uniform
    indices = torch.arange(size, device=weights.device)
    return torch.where(sums > target.unsqueeze(1), indices, size - 1).amin(dim=1)
