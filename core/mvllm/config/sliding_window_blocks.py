"""Block arithmetic of sliding windows: the first visible block, and the most blocks that a request holds.

window 6, block_size 4, the next step begins at token 13: its first query sees tokens 8 to 13

| 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 . . |
  not visible         first visible            token p is visible to queries up to p + window - 1
"""

from __future__ import annotations


def first_visible_block(num_computed_tokens: int, window: int, block_size: int) -> int:
    """The first block that is visible to queries from position `num_computed_tokens` on."""
    return max(0, num_computed_tokens - window + 1) // block_size


def max_blocks_held(num_tokens: int, window: int | None, block_size: int, max_step_tokens: int) -> int:
    """The most blocks that a request of `num_tokens` tokens ever holds in a group of layers.

    Args:
        num_tokens: At least 1.
        window: Sliding window of the layers in tokens; None for full attention.
        block_size: Tokens per block.
        max_step_tokens: Most tokens of one request in one step. All of them need blocks, in addition to the window of
            the first one.
    """
    needed = -(-num_tokens // block_size)
    if window is None:
        return needed
    # The range may begin with the last token of a block.
    return min(needed, (window - 1 + max_step_tokens - 2) // block_size + 2)
