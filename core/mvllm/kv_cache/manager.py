"""Hands KV blocks to requests and finds prefixes that are there already.

The idea: a block is *named* (see `block_hash.py`) as soon as a plan is made that fills it, not when the step has run. A
request planned in the same step can then share it. That is sound because of two promises of those who execute plans:
every plan made is executed, in order; and within a step the keys and values of all tokens are written before any are
read. So a request that is aborted or preempted in between leaves blocks that its last plan still fills.

Only a request that fails leaves nothing: `discard` takes away all names of its chain, also of the blocks it found,
since one of them may be what made it fail. Whoever shares them reads the same values, and fails by itself if bad.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from mvllm.kv_cache.block_hash import BlockHash, cache_root, hash_block, request_root
from mvllm.kv_cache.block_pool import BlockPool
from mvllm.kv_cache.block_table import BlockTable


class KVCacheManager:
    """The owner of all block tables and of the pool behind them.

    Args:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        enable_caching: Let requests share equal prefixes. Without it only siblings share, and only their prompt.
        hash_seed: Makes block names reproducible across runs; None draws them at random.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, enable_caching: bool = True, hash_seed: int | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"A KV block needs at least one slot, got block_size={block_size}.")
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._pool = BlockPool(num_blocks)
        self._root = cache_root(hash_seed)
        self._tables: set[BlockTable] = set()  # those that hold blocks

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses; some of them may still be hit."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests use, 0 to 1."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def make_table(
        self,
        token_ids: list[int],
        *,
        cache_salt: str | None = None,
        position_key: int = 0,
        sibling_group: str | None = None,
        adapter_keys: Sequence[tuple[str, str]] = (),
    ) -> BlockTable:
        """An empty table for a new request.

        Args:
            token_ids: The request's prompt; the table keeps the list and watches it grow.
            cache_salt: Only requests of the same salt share blocks.
            position_key: Likewise.
            sibling_group: With caching switched off, only requests of the same group share blocks, and only the
                prompt's.
            adapter_keys: (kind, value) pairs that name the adapter which computes with the model; likewise.
        """
        keys = [] if cache_salt is None else [("cache_salt", cache_salt)]
        if position_key:
            keys.append(("position_key", str(position_key)))
        keys.extend(adapter_keys)
        if self.enable_caching:
            return BlockTable(token_ids, request_root(self._root, keys), sys.maxsize)
        if sibling_group is not None:
            keys.append(("sibling_group", sibling_group))
            return BlockTable(token_ids, request_root(self._root, keys), len(token_ids))
        return BlockTable(token_ids, None, 0)

    def get_computed_blocks(self, table: BlockTable) -> list[int]:
        """The longest run of leading blocks whose contents are there already. A look: nothing is taken.

        The last known token is never among them: something must be computed to get logits.
        """
        if table.root is None:
            return []
        found = []
        lookup = self._pool.lookup
        for block_hash in self._block_hashes(table, (len(table.token_ids) - 1) // self.block_size):
            block = lookup(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def allocate_slots(
        self, table: BlockTable, num_tokens: int, computed_blocks: Sequence[int] = (), *, num_spare: int = 0
    ) -> list[int] | None:
        """Gives a table enough blocks for its first `num_tokens` tokens.

            table.block_ids afterwards (block_size 4, num_tokens 18)

            | 0 1 2 3 | 4 5 6 7 | 8 9 . . | . . . . | 16 17     |
            |<-- computed ----->|<------- new ----------------->|    empty table: shares what was found, takes the rest
            |<-- held -------------------->|<------ new ------->|    later calls: takes what is missing

        Args:
            table: Whose.
            num_tokens: How many tokens must have a slot.
            computed_blocks: What `get_computed_blocks` found; only for an empty table.
            num_spare: Blocks that must stay free.

        Returns:
            The blocks added behind the computed ones (none, if those held suffice), or None, with nothing changed, if
            the pool has not enough.
        """
        pool = self._pool
        num_new = -(-num_tokens // self.block_size) - len(table.block_ids) - len(computed_blocks)
        if num_new <= 0:
            return []
        if num_new + num_spare > pool.num_free - pool.num_free_among(computed_blocks):
            return None
        if computed_blocks:
            assert not table.block_ids
            pool.share(computed_blocks)
            table.block_ids.extend(computed_blocks)
            table.num_named_blocks = len(computed_blocks)
        new = pool.allocate(num_new)
        table.block_ids.extend(new)
        self._tables.add(table)
        table.num_slots = len(table.block_ids) * self.block_size
        return new

    def cache_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Names the full blocks among the first tokens of a table, so that others find them.

        Args:
            table: Whose.
            num_computed_tokens: Tokens whose keys and values are written by the plans made so far and by the one being
                made. Blocks with tokens that are not known yet get their name in a later call.
        """
        num_tokens = min(num_computed_tokens, len(table.token_ids), table.num_shareable_tokens, table.num_slots)
        num_full = num_tokens // self.block_size
        if num_full <= table.num_named_blocks:
            return
        hashes = self._block_hashes(table, num_full)
        for i in range(table.num_named_blocks, num_full):
            self._pool.name(table.block_ids[i], hashes[i])
        table.num_named_blocks = num_full

    def free(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Takes all blocks from a table; what is full stays to be found.

        Args:
            table: Whose. It can be given blocks again.
            num_computed_tokens: As for `cache_blocks`.
        """
        self.cache_blocks(table, num_computed_tokens)
        self._pool.release(table.block_ids)
        table.block_ids.clear()
        table.num_slots = table.num_named_blocks = 0
        self._tables.discard(table)

    def discard(self, table: BlockTable) -> None:
        """Takes all blocks from the table of a request that failed; nobody finds any of them again.

        It goes by name, so that it also reaches blocks that the request gave back before its failure was known.
        """
        for block_hash in table.block_hashes:
            block = self._pool.lookup(block_hash)
            if block is not None:
                self._pool.forget(block)
        self.free(table, 0)

    def reset_prefix_cache(self) -> bool:
        """Forgets all contents; False, with nothing changed, while requests hold blocks."""
        if self._tables:
            return False
        self._pool.forget_all()
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless tables, counts, free list and names agree."""
        self._pool.check_integrity()
        users = Counter(block for table in self._tables for block in table.block_ids)
        for block, count in enumerate(self._pool.ref_counts):
            assert users[block] == count, f"Block {block} is in {users[block]} tables, its count says {count}"
        for table in self._tables:
            assert table.block_ids, "A table without blocks is still listed"
            assert len(table.block_ids) == len(set(table.block_ids)), f"A table lists a block twice: {table.block_ids}"
            assert table.num_slots == len(table.block_ids) * self.block_size
            assert table.num_named_blocks <= len(table.block_ids)
            assert len(table.block_hashes) * self.block_size <= len(table.token_ids)

    def _block_hashes(self, table: BlockTable, num_blocks: int) -> list[BlockHash]:
        """Names of the first `num_blocks` blocks, all of whose tokens are known; fewer, if not all may be shared."""
        hashes, size = table.block_hashes, self.block_size
        num_blocks = min(num_blocks, table.num_shareable_tokens // size)
        assert table.root is not None
        for i in range(len(hashes), num_blocks):
            parent = hashes[i - 1] if i else table.root
            hashes.append(hash_block(parent, table.token_ids[i * size : (i + 1) * size]))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]
