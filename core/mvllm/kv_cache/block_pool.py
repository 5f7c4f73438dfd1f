"""All KV blocks of one engine: reference counts, the free list, and the prefix cache.

A *free* block is not *evicted*: it keeps its contents and its hash until it is allocated again. Until then a request
with the same prefix can take it from the free list.

    free list    head ── 7 ── 2 ── 9 ── 4 ── tail          allocated from the head, so the tail is evicted last
                  no hash     cached, oldest first
    hashes       {h1: 9, h2: 4, h5: 0}                     blocks 9 and 4 are free but can be hit, block 0 is in use

A block is a number. Its state is in parallel arrays: without an object per block the garbage collector has little to
traverse. Blocks join the arrays some thousands at a time, when all earlier ones are in use or cached, so that a pool of
millions starts at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence

from mvllm.kv_cache.block_hash import BlockHash
from mvllm.kv_cache.listener import KVCacheListener

_GROWTH = 8192
"""Blocks that join the arrays at a time."""


class BlockPool:
    """Reference counts, the free list and the hashes of `num_blocks` blocks.

    Args:
        num_blocks: At least 1. Blocks are numbered from 0.

    Attributes:
        num_free: Blocks that no request uses.
        ref_counts: How many requests use each block that has joined the arrays.
        listeners: Called when blocks get or lose their hash.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"A KV cache needs at least one block, got {num_blocks}.")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.listeners: list[KVCacheListener] = []
        self._ring = min(num_blocks, _GROWTH)
        self.ref_counts = array("i", [0]) * self._ring
        self._hashes: list[BlockHash | None] = [None] * self._ring
        self._block_by_hash: dict[BlockHash, int] = {}
        # The free list is a ring through one extra entry, numbered `_ring`, behind the blocks: its successor is the
        # head, its predecessor the tail. A block in use has stale links.
        self._next = array("i", [*range(1, self._ring + 1), 0])
        self._prev = array("i", [self._ring, *range(self._ring)])

    # ----------------------------------------------------------------------------------------------------- queries

    def get_cached_block(self, block_hash: BlockHash) -> int | None:
        """The block with this hash, in use or free."""
        return self._block_by_hash.get(block_hash)

    def get_hash(self, block: int) -> BlockHash | None:
        """The hash of a block, if it is cached."""
        return self._hashes[block]

    def cached_blocks(self) -> Collection[int]:
        """All blocks with a hash."""
        return self._block_by_hash.values()

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free."""
        ref_counts = self.ref_counts
        return sum(1 for block in block_ids if not ref_counts[block])

    def free_block_ids(self) -> list[int]:
        """The free list, the next block to allocate first."""
        blocks = self._linked_blocks()
        first_named = next((i for i, block in enumerate(blocks) if self._hashes[block] is not None), len(blocks))
        return [*blocks[:first_named], *range(self._ring, self.num_blocks), *blocks[first_named:]]

    # -------------------------------------------------------------------------------------------- allocate and free

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks from the head of the free list, and evicts their contents.

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
                    self.evict_for_reuse(block)
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
        """Removes a user from each block of one table.

        Blocks without users join the free list: those without a hash at the head, because nothing is lost with them;
        cached ones at the tail, the table's last block first, so that a prefix is evicted from its end.
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

    # ------------------------------------------------------------------------------------------------------ hashes

    def set_hash(self, block: int, block_hash: BlockHash) -> None:
        """Caches a full block under its hash, unless another block with that hash is cached."""
        if self._hashes[block] is None and block_hash not in self._block_by_hash:
            self._hashes[block] = block_hash
            self._block_by_hash[block_hash] = block
            if self.listeners:
                for listener in self.listeners:
                    listener.block_stored(block, block_hash)

    def evict_for_reuse(self, block: int) -> None:
        """Evicts the contents of a cached block that the next plan may write."""
        block_hash = self._hashes[block]
        if self.listeners and block_hash is not None:
            for listener in self.listeners:
                listener.block_reused(block, block_hash)
        self.evict(block)

    def evict(self, block: int) -> None:
        """Removes a block's hash, if it has one. Users of the block keep it."""
        block_hash = self._hashes[block]
        if block_hash is not None:
            if self.listeners:
                for listener in self.listeners:
                    listener.block_evicted(block, block_hash)
            self._hashes[block] = None
            del self._block_by_hash[block_hash]

    def evict_all(self) -> None:
        """Removes all hashes."""
        self._block_by_hash.clear()
        self._hashes = [None] * self._ring
        for listener in self.listeners:
            listener.all_evicted()

    def check_integrity(self) -> None:
        """Raises AssertionError unless counts, free list and hashes agree."""
        free = self.free_block_ids()
        listed = [block for block in free if block < self._ring]
        assert len(free) == self.num_free == len(set(free)), f"{self.num_free} blocks counted free, listed: {free}"
        unused = {block for block, count in enumerate(self.ref_counts) if count == 0}
        assert set(listed) == unused, f"Free list and reference counts differ on blocks {set(listed) ^ unused}"
        assert min(self.ref_counts) >= 0, "A block was freed more often than it was allocated"
        for block in [*listed, self._ring]:
            assert self._prev[self._next[block]] == block, f"The free list is broken behind block {block}"
        cached = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert cached == self._block_by_hash, "Hashes and blocks differ"

    def _add_unused_blocks(self, head: int) -> int:
        """Inserts blocks that were never used at the head of the free list.

        Args:
            head: The present head; the ring's own entry if the list is empty.

        Returns:
            The new head.
        """
        next_, prev, old = self._next, self._prev, self._ring
        ring = self._ring = min(old + _GROWTH, self.num_blocks)
        tail = prev[old]
        self.ref_counts.extend(array("i", [0]) * (ring - old))
        self._hashes.extend([None] * (ring - old))
        next_[old:] = array("i", [*range(old + 1, ring + 1), old])
        prev[old:] = array("i", [ring, *range(old, ring)])
        if head != old:  # link the last new block to the previous head
            next_[ring - 1], prev[head] = head, ring - 1
            next_[tail], prev[ring] = ring, tail
        return old

    def _linked_blocks(self) -> list[int]:
        """The free list without blocks that have not joined the arrays."""
        blocks, block = [], self._next[self._ring]
        while block != self._ring:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _link(self, before: int, block: int, after: int) -> None:
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
