"""All KV blocks of one engine: who uses them, which are free, and which hold something that may be reused.

The idea: *free* and *forgotten* are different things. A block that nobody uses keeps its contents and its name until it
is handed out again; until then a request with the same prefix can take it back out of the free list.

    free list    head ── 7 ── 2 ── 9 ── 4 ── tail          taken from the head, so the tail is forgotten last
                  nameless    named, oldest first
    names        {h1: 9, h2: 4, h5: 0}                     blocks 9 and 4 are free but can be hit, block 0 is in use

A block is its number. Everything about it stands in parallel arrays: no object per block, so the garbage collector has
next to nothing to walk. Blocks join the arrays some thousands at a time, when all that has been used before is taken or
named: a pool of millions starts at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from mvllm.kv_cache.block_hash import BlockHash

_GROWTH = 8192
"""Blocks that join the arrays at a time."""


class BlockPool:
    """Reference counts, the free list and the names of `num_blocks` blocks.

    Args:
        num_blocks: At least 1. Blocks are numbered from 0.

    Attributes:
        num_free: Blocks that no request uses.
        ref_counts: How many requests use each block, of those that have joined the arrays.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"A KV cache needs at least one block, got {num_blocks}.")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._ring = min(num_blocks, _GROWTH)
        self.ref_counts = array("i", [0]) * self._ring
        self._hashes: list[BlockHash | None] = [None] * self._ring
        self._block_by_hash: dict[BlockHash, int] = {}
        # The free list is a ring through one extra entry, numbered `_ring`, behind the blocks: after it comes the head,
        # before it the tail. A block in use has stale links.
        self._next = array("i", [*range(1, self._ring + 1), 0])
        self._prev = array("i", [self._ring, *range(self._ring)])

    # ------------------------------------------------------------------------------------------------------- look

    def get_cached_block(self, block_hash: BlockHash) -> int | None:
        """The block of that name, in use or free."""
        return self._block_by_hash.get(block_hash)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody uses."""
        ref_counts = self.ref_counts
        return sum(1 for block in block_ids if not ref_counts[block])

    def free_block_ids(self) -> list[int]:
        """The free list, the block to be taken next first."""
        blocks = self._linked_blocks()
        first_named = next((i for i, block in enumerate(blocks) if self._hashes[block] is not None), len(blocks))
        return [*blocks[:first_named], *range(self._ring, self.num_blocks), *blocks[first_named:]]

    # ------------------------------------------------------------------------------------------- take and give back

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks from the head of the free list; what they held is forgotten.

        The caller has checked `num_free`.
        """
        assert count <= self.num_free
        next_, ref_counts, hashes, ring = self._next, self.ref_counts, self._hashes, self._ring
        blocks = []
        block = next_[ring]
        for _ in range(count):
            if block == ring or hashes[block] is not None:
                if ring < self.num_blocks:
                    block = self._add_unused_blocks(block)
                    ring = self._ring
                else:
                    self.evict(block)
            blocks.append(block)
            ref_counts[block] = 1
            block = next_[block]
        next_[ring] = block
        self._prev[block] = ring
        self.num_free -= count
        return blocks

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds a user to each of these blocks, which may be free or in use."""
        ref_counts, next_, prev = self.ref_counts, self._next, self._prev
        for block in block_ids:
            if not ref_counts[block]:
                before, after = prev[block], next_[block]
                next_[before], prev[after] = after, before
                self.num_free -= 1
            ref_counts[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Takes a user away from each block of one table.

        Blocks that become free join the free list: nameless ones at the head, because nothing is lost with them;
        named ones at the tail, the table's last block first, so that a prefix is forgotten from its end.
        """
        ref_counts, hashes, ring = self.ref_counts, self._hashes, self._ring
        for block in reversed(block_ids):
            ref_counts[block] -= 1
            if ref_counts[block] == 0:
                if hashes[block] is None:
                    self._link(ring, block, self._next[ring])
                else:
                    self._link(self._prev[ring], block, ring)
                self.num_free += 1

    # ------------------------------------------------------------------------------------------------------- names

    def set_hash(self, block: int, block_hash: BlockHash) -> None:
        """Lets a full block be found by its name, unless another block of that name is there already."""
        if self._hashes[block] is None and block_hash not in self._block_by_hash:
            self._hashes[block] = block_hash
            self._block_by_hash[block_hash] = block

    def evict(self, block: int) -> None:
        """Takes a block's name away, where it has one. Who uses the block goes on using it."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            self._hashes[block] = None
            del self._block_by_hash[block_hash]

    def evict_all(self) -> None:
        """Takes all names away."""
        self._block_by_hash.clear()
        self._hashes = [None] * self._ring

    def check_integrity(self) -> None:
        """Raises AssertionError unless counts, free list and names agree."""
        free = self.free_block_ids()
        listed = [block for block in free if block < self._ring]
        assert len(free) == self.num_free == len(set(free)), f"{self.num_free} blocks counted free, listed: {free}"
        unused = {block for block, count in enumerate(self.ref_counts) if count == 0}
        assert set(listed) == unused, f"Free list and reference counts differ on blocks {set(listed) ^ unused}"
        assert min(self.ref_counts) >= 0, "A block was released more often than it was taken"
        for block in [*listed, self._ring]:
            assert self._prev[self._next[block]] == block, f"The free list is broken behind block {block}"
        named = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert named == self._block_by_hash, "Names and the blocks that bear them differ"

    def _add_unused_blocks(self, head: int) -> int:
        """Puts blocks that were never used in front of the free list.

        Args:
            head: The block to be taken next so far; the ring's own entry where there is none.

        Returns:
            The block to be taken next.
        """
        next_, prev, old = self._next, self._prev, self._ring
        ring = self._ring = min(old + _GROWTH, self.num_blocks)
        tail = prev[old]
        self.ref_counts.extend(array("i", [0]) * (ring - old))
        self._hashes.extend([None] * (ring - old))
        next_[old:] = array("i", [*range(old + 1, ring + 1), old])
        prev[old:] = array("i", [ring, *range(old, ring)])
        if head != old:  # the new ones end where the others begin
            next_[ring - 1], prev[head] = head, ring - 1
            next_[tail], prev[ring] = ring, tail
        return old

    def _linked_blocks(self) -> list[int]:
        """The free list as far as blocks have joined the arrays."""
        blocks, block = [], self._next[self._ring]
        while block != self._ring:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _link(self, before: int, block: int, after: int) -> None:
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
