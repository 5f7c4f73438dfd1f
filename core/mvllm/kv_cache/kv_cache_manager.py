"""Allocates KV blocks to requests and finds cached prefixes.

A block gets its hash (see `block_hash.py`) when a plan is made that fills it, not when the step has run. A request
planned in the same step, or before its results are back, can then share it. That is correct because every plan is
executed, in order, and because within a step the keys and values of all tokens are written before any are read. So a
request that is aborted or preempted meanwhile leaves blocks that its last plan still fills.

A failed request breaks this: its blocks may hold missing or wrong values. `discard` removes all hashes of its chain,
also those of blocks that it found cached, since one of these may have caused the failure. It does the same for every
request that shares a block which the failed one hashed in a plan whose results are not back, and for requests that
share blocks of these in turn (see `unconfirmed_block_hashes.py`), and returns them: they must restart. Requests that
share blocks of confirmed plans read what was written.

Layers with different attention windows have their own blocks. They are divided into *groups* of about equally many
layers, so that a block is equally large in each and one pool serves all; a request has a list of blocks per group:

    group 0, full attention   | 4 | 9 | 2 | 7 | 5 |
    group 1, sliding window   | . | . | . | 3 | 8 |      the first three were freed: they are outside of the window

A block is freed when a step is planned whose first token does not attend to it. Steps in flight may still read it; its
next write is in a later plan, and plans are executed in order. A prefix is cached if every group has the blocks that
later tokens attend to: in group 1 the last blocks suffice.

With a host tier (`host_tier.py`) a prefix may also have blocks in host memory. The plan that starts the request loads
them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from mvllm.config.sliding_window_blocks import first_visible_block, max_blocks_held
from mvllm.kv_cache.block_hash import BlockHash, hash_block, items_in_block, make_root_hash, request_root_hash
from mvllm.kv_cache.block_pool import BlockPool
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.event_recorder import KVCacheEventRecorder
from mvllm.kv_cache.host_tier import HostTier
from mvllm.kv_cache.prefix_search import OUT_OF_WINDOW, PrefixSearch, group_hash
from mvllm.kv_cache.state_slots import StateSlots
from mvllm.kv_cache.unconfirmed_block_hashes import UnconfirmedBlockHashes
from mvllm.kv_events.prefix_index import sharing_keys
from mvllm.messages.multimodal import ItemSpan


class CachedPrefix(NamedTuple):
    """What of a request's tokens is cached.

    Attributes:
        blocks: The blocks that it can start with, for `allocate_slots`; see `get_computed_blocks`.
        num_shared_tokens: Leading tokens with cached blocks. In models with sequence states there may be more of them
            than tokens that it can start with; elsewhere it is 0.
    """

    blocks: list[int]
    num_shared_tokens: int = 0


class KVCacheManager:
    """Owner of all block tables and of the block pool.

    Args:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        enable_caching: Requests share equal prefixes. Without it only siblings share, and only their prompt.
        hash_seed: Makes block hashes reproducible across runs; None draws a random root.
        windows: Attention window of each group of layers in tokens, or None for full attention.
        max_step_tokens: Most tokens of one request in one step.
        root: Root of all block hashes, instead of a seed.
        tier: Keeps blocks in host memory; None for the device alone.

    Attributes:
        search: Finds prefixes over all groups of layers.
        tier: Keeps blocks in host memory; None for the device alone.
        unconfirmed: Hashes set by plans whose results are not back. The scheduler confirms them.
        states: The state slots; None in models without sequence states, see StateKVCacheManager.
        events: Records what is cached; None unless `record_events` was called.
    """

    states: StateSlots | None = None
    events: KVCacheEventRecorder | None = None

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        hash_seed: int | None = None,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = sys.maxsize,
        root: BlockHash | None = None,
        tier: HostTier | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}.")
        if not windows or any(window is not None and window < 1 for window in windows):
            raise ValueError(f"windows must have a positive number of tokens, or None, per group, not {windows}.")
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._windows = tuple(windows)
        self._max_step_tokens = max_step_tokens
        self._has_one_full_group = self._windows == (None,)
        self._pool = BlockPool(num_blocks)
        self._root = self._first_root = make_root_hash(hash_seed) if root is None else root
        self.search = PrefixSearch(self._windows, block_size)
        self._tables: set[BlockTable] = set()  # those that hold blocks
        self.unconfirmed = UnconfirmedBlockHashes()
        self._lookup: Callable[[BlockHash], int | None] = self._pool.get_cached_block
        self.tier = tier
        if tier is not None:
            self._engine_key = os.urandom(16).hex()
            tier.attach(self._pool, self.unconfirmed)
            self._lookup = self._find_in_tiers

    def record_events(self, *, with_events: bool, with_changes: bool) -> KVCacheEventRecorder:
        """Begins to record what is cached, see KVCacheEventRecorder. Once, while nothing is cached."""
        self.events = KVCacheEventRecorder(
            self.block_size,
            with_events=with_events,
            with_changes=with_changes,
            has_tiers=self.tier is not None,
        )
        self._pool.listeners.append(self.events)
        if self.tier is not None and self.events.records_media:
            self.tier.blocks.host.listeners.append(self.events)
        return self.events

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._pool.num_blocks

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with its own blocks."""
        return len(self._windows)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request uses; some of them may be cached."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests use."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds at once, all groups together."""
        return sum(
            max_blocks_held(num_tokens, window, self.block_size, self._max_step_tokens) for window in self._windows
        )

    def make_table(
        self,
        token_ids: list[int],
        *,
        cache_salt: str | None = None,
        position_key: int = 0,
        sibling_group: str | None = None,
        adapter_keys: Sequence[tuple[str, str]] = (),
        items: Sequence[ItemSpan] = (),
        adapter_hash: str | None = None,
    ) -> BlockTable:
        """An empty table for a new request.

        Args:
            token_ids: The request's prompt; the table keeps a reference to the list, which grows.
            cache_salt, position_key: Only requests with equal values share blocks.
            sibling_group: Without prefix caching, only requests of the same group share blocks, and only the prompt's.
            adapter_keys: (kind, value) pairs that name the LoRA adapter in this engine.
            adapter_hash: Names what the adapter computes, in all engines. With a host tier, requests share blocks if
                this is equal. Without a tier, or if it is not known, if `adapter_keys` are; then in this engine only.
            items: Spans of the images, audio and embeddings of the prompt, by rising offset.
        """
        keys = sharing_keys(cache_salt, position_key, adapter_keys, items)
        named = keys
        if adapter_keys and self.tier is not None:
            if adapter_hash is not None:
                named = sharing_keys(cache_salt, position_key, [("adapter", adapter_hash)], items)
            else:
                named = [*keys, ("engine", self._engine_key)]  # in another engine the adapter may have other weights
        if self.enable_caching:
            root = request_root_hash(self._root, named)
            table = BlockTable(token_ids, root, sys.maxsize, self.num_groups, keys, items)
        elif sibling_group is not None:
            keys.append(("sibling_group", sibling_group))
            root = request_root_hash(self._root, [*named, keys[-1]] if named is not keys else keys)
            table = BlockTable(token_ids, root, len(token_ids), self.num_groups, keys, items)
        else:
            table = BlockTable(token_ids, None, 0, self.num_groups)
        self._add_state(table, has_siblings=sibling_group is not None)
        return table

    def _add_state(self, table: BlockTable, *, has_siblings: bool) -> None:
        """Gives a new table the slots of its sequence state. Default: there are no states."""

    def get_computed_blocks(self, table: BlockTable) -> list[int]:
        """The longest cached prefix, as far as later tokens attend to it. No side effects.

        The last known token is never in it: computing logits needs at least one token.

        Returns:
            Its blocks, for `allocate_slots`; those of one group after those of the other, equally many per group. Host
            block h is -2 - h.
        """
        if table.root is None:
            return []
        return self._cached_blocks(self._block_hashes(table, (len(table.token_ids) - 1) // self.block_size))

    def find_prefix(self, table: BlockTable) -> CachedPrefix:
        """The longest cached prefix of a request. No side effects."""
        return CachedPrefix(self.get_computed_blocks(table))

    def allocate_slots(
        self,
        table: BlockTable,
        num_tokens: int,
        computed_blocks: Sequence[int] = (),
        *,
        num_spare: int = 0,
        num_computed_tokens: int = 0,
    ) -> list[int] | None:
        """Gives a table enough blocks for its first `num_tokens` tokens, in each group.

            table.block_ids afterwards (block_size 4, num_tokens 18)

            | 0 1 2 3 | 4 5 6 7 | 8 9 . . | . . . . | 16 17 . . |
            |<--- computed ---->|<----------- new ------------->|    empty table: shares cached blocks
            |<----------- held ---------->|<------- new ------->|    later calls: allocates what is missing

        A group with a window first frees the blocks outside of the window, and gets blocks for as many tokens behind it
        as one step may have. A longer prompt allocates and frees blocks as it goes on.

        Args:
            table: The request's table.
            num_tokens: How many tokens need a slot, now or in later steps.
            computed_blocks: What `get_computed_blocks` returned; only for an empty table.
            num_spare: Blocks that must stay free.
            num_computed_tokens: First position of the next step of a table that has blocks. Blocks outside of its
                window are freed.

        Returns:
            The blocks added behind the computed ones (none, if the table has enough), those of one group after those of
            the other; or None, with nothing allocated, if the pool has not enough.
        """
        pool, size = self._pool, self.block_size
        if self._has_one_full_group and not computed_blocks:  # fast path of the common case
            held = table.groups[0].block_ids
            num_new = -(-num_tokens // size) - len(held)
            if num_new <= 0:
                return []
            if num_new + num_spare > pool.num_free:
                return None
            new = pool.allocate(num_new)
            held.extend(new)
            self._tables.add(table)
            table.num_slots = len(held) * size
            return new
        num_found = len(computed_blocks) // len(self._windows)
        if computed_blocks:
            assert not table.block_ids
            num_computed_tokens = num_found * size
        self._free_blocks_outside_window(table, num_computed_tokens)
        missing = self._count_missing(table, num_tokens, num_computed_tokens, num_found)
        num_new = sum(missing)
        if not num_new:
            return []
        found = [block for block in computed_blocks if block > OUT_OF_WINDOW]
        num_loads = 0 if self.tier is None else sum(block < OUT_OF_WINDOW for block in computed_blocks)
        if num_new + num_loads + num_spare > pool.num_free - pool.count_free(found):
            return None
        if computed_blocks:
            pool.touch(found)
            self.unconfirmed.record_reader(table, found)
            if num_loads:
                computed_blocks = self._plan_loads(table, computed_blocks)
            _add_computed_blocks(table, computed_blocks)
        new = pool.allocate(num_new)
        start = 0
        for blocks, count in zip(table.groups, missing):
            blocks.block_ids += new[start : start + count]
            start += count
        self._tables.add(table)
        table.num_slots = min(len(blocks.block_ids) for blocks in table.groups) * size
        return new

    def _count_missing(self, table: BlockTable, num_tokens: int, num_computed_tokens: int, num_found: int) -> list[int]:
        """By group, the blocks that a table lacks for its first tokens, besides those that it holds and has found."""
        size, wanted = self.block_size, -(-num_tokens // self.block_size)
        missing = []
        for blocks, window in zip(table.groups, self._windows):
            end = wanted
            if window is not None:
                first = first_visible_block(num_computed_tokens, window, size)
                end = min(wanted, first + max_blocks_held(num_tokens, window, size, self._max_step_tokens))
            missing.append(max(0, end - len(blocks.block_ids) - num_found))
        return missing

    def cache_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Hashes the full blocks among the first tokens of a table, so that other requests find them.

        Args:
            table: The request's table.
            num_computed_tokens: Tokens whose keys and values are written by the plans made so far and by the one being
                made. Blocks with unknown tokens get their hash in a later call.
        """
        num_tokens = min(num_computed_tokens, len(table.token_ids), table.num_shareable_tokens, table.num_slots)
        num_full = num_tokens // self.block_size
        if num_full <= table.num_hashed_blocks:
            return
        hashes, unconfirmed = self._block_hashes(table, num_full), self.unconfirmed.writers
        if self._has_one_full_group:
            block_ids = table.groups[0].block_ids
            for i in range(table.num_hashed_blocks, num_full):
                block = block_ids[i]
                self._pool.set_hash(block, hashes[i])
                unconfirmed[block] = table
        else:
            for group, blocks in enumerate(table.groups):
                for i in range(max(table.num_hashed_blocks, blocks.num_dropped), num_full):
                    block = blocks.block_ids[i]
                    self._pool.set_hash(block, group_hash(hashes[i], group))
                    unconfirmed[block] = table
        if self.events is not None:
            self.events.blocks_hashed(table, table.num_hashed_blocks, num_full)
        table.num_hashed_blocks = num_full

    def free(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Frees all blocks of a table. Full blocks stay cached.

        Args:
            table: The request's table. It can be given blocks again.
            num_computed_tokens: As for `cache_blocks`.
        """
        self.cache_blocks(table, num_computed_tokens)
        if self.tier is not None:
            self.tier.cancel_loads(table)
        self._pool.free(table.held_blocks)
        for blocks in table.groups:
            blocks.block_ids.clear()
            blocks.num_dropped = 0
        table.num_slots = table.num_hashed_blocks = 0
        self._tables.discard(table)

    def take_back(self, table: BlockTable, lengths: Sequence[int]) -> None:
        """Undoes an `allocate_slots` that only appended blocks, before they are hashed or written.

        Args:
            lengths: Length of each group's block list before.
        """
        for blocks, length in zip(table.groups, lengths):
            self._pool.free(blocks.block_ids[length:])
            del blocks.block_ids[length:]
        table.num_slots = min(lengths) * self.block_size

    def discard(self, tables: Collection[BlockTable]) -> list[BlockTable]:
        """Frees and evicts all blocks of requests that failed in the oldest unconfirmed plan, and of all that depend on
        them.

        Blocks are found by hash, so that blocks which a request freed before its failure are evicted too.

        Returns:
            The tables that depend on `tables`. What has been computed with them since must be dropped.
        """
        dependents = self.unconfirmed.dependents(tables)
        for table in (*tables, *dependents):
            for block_hash in table.block_hashes:
                for group in range(self.num_groups):
                    block = self._pool.get_cached_block(group_hash(block_hash, group))
                    if block is not None:
                        self._pool.evict(block)
            self.free(table, 0)
        if self.tier is not None:
            self._discard_in_tier(self.tier, (*tables, *dependents))
        return dependents

    def confirm(self, step: int) -> None:
        """The results of a plan are back and its failed requests were discarded: what it has written is right."""
        for writers in self.unconfirmed.pop_confirmed(step):
            if self.tier is not None:
                self.tier.add_confirmed(writers)

    def reset_prefix_cache(self, *, keeps_tiers: bool = False) -> bool:
        """Evicts all contents. Does nothing and returns False while requests hold blocks.

        Args:
            keeps_tiers: Only the device loses its contents; they are right, and host blocks with them stay.
        """
        if self._tables:
            return False
        self._pool.evict_all()
        if self.tier is not None:
            self._reset_tier(self.tier, keeps_contents=keeps_tiers)
        return True

    def forget_computed(self) -> None:
        """Evicts all contents, also while requests hold blocks: they keep them, and share none from now on.

        Only while no plan is in flight.
        """
        for table in self._tables:
            table.root, table.num_shareable_tokens = None, 0
        self.unconfirmed.writers.clear()
        self._pool.evict_all()
        if self.tier is not None:
            self._reset_tier(self.tier, keeps_contents=False)

    def renew_table(self, table: BlockTable, other: BlockTable) -> None:
        """Gives the table of a waiting request the root of a new one, since hashes have another root now."""
        table.root, table.num_shareable_tokens = other.root, other.num_shareable_tokens
        table.block_hashes.clear()

    def restore_root(self) -> None:
        """Contents are again those of the engine's start. Only while there are no requests."""
        self._root = self._first_root

    def release_host_blocks(self, table: BlockTable) -> None:
        """Ends keeping host blocks for a waiting request, which starts or has ended."""
        if self.tier is not None:
            self.tier.release(table)

    def keys_of(self, table: BlockTable, num_blocks: int) -> list[list[BlockHash]]:
        """The keys of the first blocks of a table by block, those of all groups; fewer if not all may be shared."""
        hashes = [] if table.root is None else self._block_hashes(table, num_blocks)
        return [[group_hash(block_hash, group) for group in range(self.num_groups)] for block_hash in hashes]

    def check_integrity(self) -> None:
        """Raises AssertionError unless tables, counts, free list and hashes agree."""
        self._pool.check_integrity()
        users = Counter(block for table in self._tables for block in table.held_blocks)
        for block, count in enumerate(self._pool.ref_counts):
            assert users[block] == count, f"Block {block} is in {users[block]} tables, its count says {count}"
        for table in self._tables:
            held = table.held_blocks
            assert held, "A table without blocks is still listed"
            assert len(held) == len(set(held)), f"A table lists a block twice: {held}"
            lengths = [len(blocks.block_ids) for blocks in table.groups]
            assert table.num_slots == min(lengths) * self.block_size
            assert table.num_hashed_blocks <= min(lengths)
            assert len(table.block_hashes) * self.block_size <= len(table.token_ids)
            for blocks, window in zip(table.groups, self._windows, strict=True):
                assert not blocks.num_dropped or window is not None, "A block within the window was freed"
                assert all(0 <= block < self.num_blocks for block in blocks.block_ids)

    def _free_blocks_outside_window(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Frees blocks that no token from position `num_computed_tokens` on attends to."""
        for blocks, window in zip(table.groups, self._windows):
            if window is None or not blocks.block_ids:
                continue
            first = first_visible_block(num_computed_tokens, window, self.block_size)
            if first > blocks.num_dropped:
                self.cache_blocks(table, num_computed_tokens)
                self._pool.free(blocks.block_ids[blocks.num_dropped : first])
                blocks.num_dropped = first

    def _cached_blocks(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The longest cached prefix of these blocks, see `get_computed_blocks`."""
        return self.search.find(hashes, self._lookup)

    def _find_in_tiers(self, key: BlockHash) -> int | None:
        """The block with this hash, or -2 - h for host block h."""
        block = self._pool.get_cached_block(key)
        if block is None and self.tier is not None:
            index = self.tier.blocks.host.get(key)
            return None if index is None else -2 - index
        return block

    def _plan_loads(self, table: BlockTable, computed_blocks: Sequence[int]) -> list[int]:
        """Allocates blocks for the host blocks among these, and loads them. Returns the blocks."""
        assert self.tier is not None
        tier, loaded = self.tier.blocks, {}
        places = [place for place in computed_blocks if place < OUT_OF_WINDOW]
        for place in places:
            tier.host.pin(-2 - place)  # blocks that are evicted below need host blocks
        for place, block in zip(places, self._pool.allocate(len(places)), strict=True):
            key = tier.host.key_of(-2 - place)
            assert key is not None
            tier.load(table, -2 - place, block)
            tier.host.unpin(-2 - place)
            self._pool.set_hash(block, key)
            self.unconfirmed.writers[block] = table
            loaded[place] = block
        if self.events is not None:
            self.events.blocks_hashed(table, 0, len(computed_blocks) // self.num_groups)
        return [loaded.get(place, place) for place in computed_blocks]

    def _discard_in_tier(self, tier: HostTier, tables: Iterable[BlockTable]) -> None:
        hashes = [block_hash for table in tables for block_hash in table.block_hashes]
        tier.discard([group_hash(each, group) for each in hashes for group in range(self.num_groups)], hashes)

    def _reset_tier(self, tier: HostTier, *, keeps_contents: bool) -> None:
        for each in tier.tiers:
            each.forget_device()
        if not keeps_contents:
            # Connectors may hold contents of the old weights, so later ones have another root.
            tier.clear()
            self._root = make_root_hash()
            if self.events is not None:
                self.events.clear()

    def _block_hashes(self, table: BlockTable, num_blocks: int) -> list[BlockHash]:
        """Hashes of the first `num_blocks` blocks, whose tokens are all known; fewer if not all may be shared."""
        hashes, size = table.block_hashes, self.block_size
        num_blocks = min(num_blocks, table.num_shareable_tokens // size)
        assert table.root is not None
        for i in range(len(hashes), num_blocks):
            parent = hashes[i - 1] if i else table.root
            tokens = table.token_ids[i * size : (i + 1) * size]
            if table.items:
                hashes.append(hash_block(parent, tokens, items_in_block(table.items, i * size, (i + 1) * size)))
            else:
                hashes.append(hash_block(parent, tokens))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]


def _add_computed_blocks(table: BlockTable, computed_blocks: Sequence[int]) -> None:
    """Adds cached blocks, equally many per group, to an empty table."""
    num_found = len(computed_blocks) // len(table.groups)
    for i, blocks in enumerate(table.groups):
        cached = computed_blocks[i * num_found : (i + 1) * num_found]
        blocks.num_dropped = cached.count(OUT_OF_WINDOW)
        blocks.block_ids += [max(block, 0) for block in cached]  # block tables need an entry, which is not read
    table.num_hashed_blocks = num_found


class NullKVCacheManager(KVCacheManager):
    """KV cache manager of models without a KV cache: allocates no blocks, and every request fits.

    Args:
        max_model_len: Longest prompt in tokens.
    """

    def __init__(self, max_model_len: int) -> None:
        super().__init__(num_blocks=1, block_size=max_model_len, enable_caching=False)  # the block is never allocated

    def allocate_slots(
        self,
        table: BlockTable,
        num_tokens: int,
        computed_blocks: Sequence[int] = (),
        *,
        num_spare: int = 0,
        num_computed_tokens: int = 0,
    ) -> list[int]:
        """Returns no blocks."""
        table.num_slots = num_tokens
        return []
