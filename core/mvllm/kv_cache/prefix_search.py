"""Finds the longest prefix whose blocks exist, as far as later tokens attend to them.

A group of layers with full attention needs all blocks of a prefix, a group with a window those in the window behind it:

    group 0, full attention   | 4 | 9 | 2 | 7 |
    group 1, sliding window   | . | . | 3 | 8 |      the first two are not needed behind these four blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mvllm.config.sliding_window_blocks import first_visible_block
from mvllm.kv_cache.block_hash import BlockHash

OUT_OF_WINDOW = -1
"""Placeholder for a block that no later token attends to."""

Lookup = Callable[[BlockHash], int | None]
"""The place of a block by its key in a group; None if it does not exist."""


def group_hash(block_hash: BlockHash, group: int) -> BlockHash:
    """The key of a block in one group of layers."""
    return block_hash + group.to_bytes(2, "little") if group else block_hash


class PrefixSearch:
    """Searches for prefixes.

    Args:
        windows: Attention window of each group of layers in tokens, or None for full attention.
        block_size: Tokens per block.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int) -> None:
        self._windows = tuple(windows)
        self._block_size = block_size
        self._has_one_full_group = self._windows == (None,)

    def find(self, hashes: Sequence[BlockHash], lookup: Lookup) -> list[int]:
        """The places of the longest prefix of these blocks.

        Returns:
            The places of one group after those of the other, equally many per group, with OUT_OF_WINDOW for blocks that
            are not needed.
        """
        if self._has_one_full_group:
            return self._leading(hashes, 0, lookup)
        found = {g: self._leading(hashes, g, lookup) for g, window in enumerate(self._windows) if window is None}
        length = min([len(hashes), *map(len, found.values())])
        # The window of every shorter prefix that contains the missing block contains it too.
        while length and (missing := self._first_missing(hashes, length, lookup)) is not None:
            length = missing
        places: list[int] = []
        for group, window in enumerate(self._windows):
            if window is None:
                places += found[group][:length]
            else:
                first = self._first_visible(length, window)
                seen = [lookup(group_hash(block_hash, group)) for block_hash in hashes[first:length]]
                places += [OUT_OF_WINDOW] * first + [place for place in seen if place is not None]
        return places

    def needed(self, length: int) -> Iterator[tuple[int, int]]:
        """The groups and indices of the blocks that a prefix of `length` blocks needs, in the order of its tokens."""
        firsts = [0 if window is None else self._first_visible(length, window) for window in self._windows]
        for i in range(min(firsts), length):
            for group, first in enumerate(firsts):
                if i >= first:
                    yield group, i

    def _first_visible(self, length: int, window: int) -> int:
        return first_visible_block(length * self._block_size, window, self._block_size)

    def _leading(self, hashes: Sequence[BlockHash], group: int, lookup: Lookup) -> list[int]:
        """The longest run of leading blocks that exist in the group."""
        found = []
        for block_hash in hashes:
            place = lookup(group_hash(block_hash, group))
            if place is None:
                break
            found.append(place)
        return found

    def _first_missing(self, hashes: Sequence[BlockHash], length: int, lookup: Lookup) -> int | None:
        """Index of the first block in a window behind `length` blocks that does not exist in its group."""
        for group, window in enumerate(self._windows):
            if window is not None:
                for i in range(self._first_visible(length, window), length):
                    if lookup(group_hash(hashes[i], group)) is None:
                        return i
        return None
