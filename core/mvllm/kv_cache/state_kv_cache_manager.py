"""The KV cache manager of models with sequence states."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from mvllm.kv_cache.block_hash import BlockHash
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.host_tier import HostTier
from mvllm.kv_cache.kv_cache_manager import CachedPrefix, KVCacheManager
from mvllm.kv_cache.request_state_slots import RequestStateSlots
from mvllm.kv_cache.state_slots import LEAST_DISTANCE, StateSlots


class StateKVCacheManager(KVCacheManager):
    """Also allocates state slots, see `state_slots.py`. A request that holds blocks holds a state slot.

    A cached prefix ends at a snapshot. The blocks behind it are not shared: its tokens have to be computed for the
    state. In models without attention blocks have no contents. They only name tokens.

    Args:
        num_blocks, block_size, enable_caching, hash_seed, windows, max_step_tokens, root, tier: As for KVCacheManager.
        num_state_slots: At least 1; 3 for guided requests, whose first side may hold a snapshot and a slot.
        state_snapshot_interval: Tokens between two regular snapshots; 0 for none.
        least_snapshot_distance: See StateSlots.
    """

    states: StateSlots

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
        num_state_slots: int,
        state_snapshot_interval: int,
        least_snapshot_distance: int = LEAST_DISTANCE,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_caching=enable_caching,
            hash_seed=hash_seed,
            windows=windows,
            max_step_tokens=max_step_tokens,
            root=root,
            tier=tier,
        )
        self.states = StateSlots(
            num_state_slots,
            block_size=block_size,
            interval=state_snapshot_interval,
            unconfirmed=self.unconfirmed,
            hashes_of=self._block_hashes,
            least_distance=least_snapshot_distance,
            host_tier=tier,
        )

    @property
    def usage(self) -> float:
        """Fraction of the blocks or of the state slots that requests use, whichever is larger."""
        return max(super().usage, 1.0 - self.states.num_free / self.states.num_slots)

    def _add_state(self, table: BlockTable, *, has_siblings: bool) -> None:
        table.state = RequestStateSlots(len(table.token_ids), has_siblings=has_siblings)

    def get_computed_blocks(self, table: BlockTable) -> list[int]:
        """The longest cached prefix that ends at a snapshot, see KVCacheManager. No side effects."""
        return self.find_prefix(table).blocks

    def find_prefix(self, table: BlockTable) -> CachedPrefix:
        """The longest cached prefix that ends at a snapshot, and the longest one without regard to snapshots."""
        if table.root is None:
            return CachedPrefix([])
        hashes = self._block_hashes(table, (len(table.token_ids) - 1) // self.block_size)
        found = self._cached_blocks(hashes)
        num_found = len(found) // self.num_groups
        num_shared_tokens = num_found * self.block_size
        for count in self.states.snapshot_lengths(hashes[:num_found]):
            if count == num_found:
                return CachedPrefix(found, num_shared_tokens)
            blocks = found[:count] if self._has_one_full_group else self._cached_blocks(hashes[:count])
            if len(blocks) == count * self.num_groups:
                return CachedPrefix(blocks, num_shared_tokens)
        return CachedPrefix([], num_shared_tokens)

    def allocate_slots(
        self,
        table: BlockTable,
        num_tokens: int,
        computed_blocks: Sequence[int] = (),
        *,
        num_spare: int = 0,
        num_computed_tokens: int = 0,
    ) -> list[int] | None:
        """As in KVCacheManager. An empty table also gets a state slot; None if none is free."""
        starts = table.state.slot < 0
        if starts and not self.states.num_free:
            return None
        new = super().allocate_slots(
            table, num_tokens, computed_blocks, num_spare=num_spare, num_computed_tokens=num_computed_tokens
        )
        if starts and new is not None:
            count = len(computed_blocks) // self.num_groups
            self.states.start(table, count * self.block_size, table.block_hashes[count - 1] if count else None)
        return new

    def free(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Frees all blocks of a table and its state slot. Full blocks and snapshots stay cached."""
        super().free(table, num_computed_tokens)
        self.states.free(table, num_computed_tokens)

    def discard(self, tables: Collection[BlockTable]) -> list[BlockTable]:
        """As in KVCacheManager. Also evicts the snapshots of these requests."""
        dependents = super().discard(tables)
        for table in (*tables, *dependents):
            self.states.evict(table.block_hashes)
        return dependents

    def reset_prefix_cache(self, *, keeps_tiers: bool = False) -> bool:
        """As in KVCacheManager."""
        if not super().reset_prefix_cache(keeps_tiers=keeps_tiers):
            return False
        self.states.evict_all()
        return True

    def forget_computed(self) -> None:
        """As in KVCacheManager. Requests keep their state slots."""
        super().forget_computed()
        self.states.forget(self._tables)

    def check_integrity(self) -> None:
        """As in KVCacheManager, and raises AssertionError unless state slots and requests agree."""
        super().check_integrity()
        self.states.check_integrity(self._tables)
