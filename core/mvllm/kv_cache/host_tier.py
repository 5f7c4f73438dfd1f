"""The host tier: copies of cached blocks and of state snapshots in host memory, made and read by the steps themselves.

A plan names blocks to copy to host blocks, and host blocks to copy to blocks. Workers do that first: saves, loads, then
the model. Plans are executed in order, so contents are known as soon as a plan is made: a later plan may load them,
and the workers wait for their copies first. Who reads host memory without a plan gets names when copies have ended.

    plan     5                     6                        7                   8
             block 4 gets a hash   results of 5: confirmed
                                                            save 4 -> host 0    block 4 is evicted; host 0 has its hash
                                   block 9, confirmed and not saved, is evicted: save 9 -> host 1

Saved are blocks whose hashes are confirmed (see `unconfirmed_block_hashes.py`), so a failed step leaves nothing wrong
here: the oldest first, a bounded number in each plan; and at once what a plan evicts. A loaded block gets its hash like
one that the plan computes.

Host blocks that a plan in flight reads or writes are pinned until its results are back. Only then connectors, which do
not wait for plans, may read or fill them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mvllm.kv_cache.block_pool import BlockPool
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.host_block_pool import HostBlockPool
from mvllm.kv_cache.listener import KVCacheListener
from mvllm.kv_cache.unconfirmed_block_hashes import UnconfirmedBlockHashes
from mvllm.kv_transfer.connector import BlockKey, HostBlock
from mvllm.messages.scheduler_output import SchedulerOutput

_STATE_SUFFIX = b"\xff\xff"
"""Behind the hash of a snapshot's tokens, so that its key is not that of a block."""


class PoolTier(KVCacheListener):
    """The host blocks of the contents of one BlockPool.

    Args:
        pool: The pool of KV blocks, or of state slots.
        host: The index of its host blocks.
        unconfirmed: Tells whose contents may still be wrong.
        is_state: The pool holds state slots: slot s has the number ~s in `unconfirmed`.
        max_saves: Most saves of a plan besides those of evicted blocks; 0 to save nothing.
        saves_evicted: Also save evicted blocks that were saved before, but are in no host block any more.

    Attributes:
        unsaved: Confirmed blocks whose contents are to be saved, in the order of their confirmation.
        saves: Host block to block, of the plan that is being made.
        loads: Table to pairs of a host block and the block that it is loaded to, of the plan that is being made.
        num_saved, num_loaded: Blocks copied by all plans.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostBlockPool,
        unconfirmed: UnconfirmedBlockHashes,
        *,
        is_state: bool,
        max_saves: int,
        saves_evicted: bool,
    ) -> None:
        self.pool = pool
        self.host = host
        self.is_state = is_state
        self._unconfirmed = unconfirmed
        self._max_saves = max_saves
        self._saves_evicted = saves_evicted
        self.unsaved: dict[int, None] = {}
        self.saves: dict[int, int] = {}
        self.loads: dict[BlockTable, list[tuple[int, int]]] = {}
        self.num_saved = self.num_loaded = 0
        if max_saves:
            pool.listeners.append(self)

    def number(self, block: int) -> int:
        """The number of a block in the records of unconfirmed hashes."""
        return ~block if self.is_state else block

    def is_confirmed(self, block: int) -> bool:
        """Whether the contents of a block with a hash are known to be right."""
        number = self.number(block)
        return not any(number in record.writers for record in self._unconfirmed.records)

    def add_confirmed(self, block: int) -> None:
        """A plan that gave a block its hash has ended well."""
        key = self.pool.get_hash(block)
        if key is not None and self._max_saves and not self._has(key) and self.is_confirmed(block):
            self.unsaved[block] = None

    def add_key(self, key: BlockKey) -> None:
        """Saves the block with this key again, if its host block is used by other contents now."""
        block = self.pool.get_cached_block(key)
        if block is not None:
            self.add_confirmed(block)

    def save(self, block: int, key: BlockKey) -> int | None:
        """Saves a block with the plan that is being made. Returns the host block, pinned once; None if all are pinned.

        Args:
            key: Of its contents at the begin of this plan, which are confirmed.
        """
        index = self.host.allocate(key)
        if index is not None:
            self.host.publish(index)
            self.saves[index] = block
            self.unsaved.pop(block, None)
        return index

    def load(self, table: BlockTable, index: int, block: int) -> None:
        """Loads a host block with the plan that is being made."""
        self.host.pin(index)
        self.loads.setdefault(table, []).append((index, block))

    def cancel_loads(self, table: BlockTable) -> None:
        """Drops the loads of a table that is freed while the plan is being made: its blocks have no contents."""
        for index, block in self.loads.pop(table, ()):
            self.pool.evict(block)
            self.host.unpin(index)

    def end_plan(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Completes the copies of a plan, and begins the next one.

        Returns:
            Saved blocks and their host blocks, loaded blocks and their host blocks.
        """
        if self.unsaved:
            self._save_confirmed()
        saves, self.saves = self.saves, {}
        loads = [pair for pairs in self.loads.values() for pair in pairs]
        self.loads = {}
        self.num_saved += len(saves)
        self.num_loaded += len(loads)
        return list(saves.values()), list(saves), [block for _, block in loads], [index for index, _ in loads]

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Forgets the contents of these keys. Their blocks have lost their hashes."""
        keys = set(keys)
        for index in [index for index in self.saves if self.host.key_of(index) in keys]:
            del self.saves[index]
            self.host.unpin(index)
        self.host.discard(keys)

    def forget_device(self) -> None:
        """The pool loses its contents between two plans: nothing of it can be saved any more."""
        self.unsaved.clear()
        self.discard([key for index in self.saves if (key := self.host.key_of(index)) is not None])

    def clear(self) -> None:
        """Forgets all contents, between two plans."""
        self.forget_device()
        self.host.discard_all()

    def _has(self, key: BlockKey) -> bool:
        return self.host.get(key) is not None or self.host.get_filling(key) is not None

    def _save_confirmed(self) -> None:
        """Adds saves of confirmed blocks to the plan."""
        for block in list(self.unsaved)[: 2 * self._max_saves]:
            if len(self.saves) >= self._max_saves:
                return
            key = self.pool.get_hash(block)
            if key is None or self._has(key) or not self.is_confirmed(block):
                del self.unsaved[block]
            elif self.save(block, key) is None:
                return

    def block_reused(self, block: int, block_hash: BlockKey) -> None:
        """Saves a block whose contents are evicted by the plan that is being made."""
        was_unsaved = block in self.unsaved
        self.unsaved.pop(block, None)
        if (was_unsaved or self._saves_evicted) and not self._has(block_hash) and self.is_confirmed(block):
            self.save(block, block_hash)


class HostTier:
    """The host blocks of KV blocks and of state snapshots.

    Args:
        num_blocks: Host blocks for KV blocks.
        num_states: Host blocks for snapshots; 0 in models without sequence states.
        max_saved_blocks, max_saved_states: Most saves in a plan besides those of evicted contents; 0 to save nothing.
        saves_evicted: See PoolTier.

    Attributes:
        blocks: The tier of the KV blocks.
        states: The tier of the snapshots; None in models without sequence states.
        listeners: Called when contents are forgotten.
    """

    blocks: PoolTier
    states: PoolTier | None = None

    def __init__(
        self,
        num_blocks: int,
        num_states: int = 0,
        *,
        max_saved_blocks: int = 16,
        max_saved_states: int = 4,
        saves_evicted: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_states = num_states
        self._max_saves = max_saved_blocks, max_saved_states
        self._saves_evicted = saves_evicted
        self._table_pins: dict[BlockTable, list[tuple[PoolTier, int]]] = {}
        self._in_flight: dict[int, list[tuple[PoolTier, list[int], list[int]]]] = {}
        self.listeners: list[KVCacheListener] = []

    def attach(self, pool: BlockPool, unconfirmed: UnconfirmedBlockHashes) -> None:
        """Connects the tier with the pool of KV blocks. Once, before the first plan."""
        self.blocks = self._make_tier(pool, unconfirmed, self.num_blocks, is_state=False)

    def attach_states(self, pool: BlockPool, unconfirmed: UnconfirmedBlockHashes) -> PoolTier:
        """Connects the tier with the pool of state slots. Once, before the first plan."""
        self.states = self._make_tier(pool, unconfirmed, self.num_states, is_state=True)
        return self.states

    @property
    def tiers(self) -> list[PoolTier]:
        """Both tiers, or one."""
        return [self.blocks] if self.states is None else [self.blocks, self.states]

    @property
    def has_unsaved(self) -> bool:
        """Whether the next plan has something to save, if host blocks can be allocated."""
        return any(tier.unsaved or tier.saves for tier in self.tiers)

    @property
    def can_save(self) -> bool:
        """Whether a plan without requests would save something."""
        return any(tier.saves or (tier.unsaved and tier.host.num_available) for tier in self.tiers)

    # ------------------------------------------------------------------------------------------------------- plans

    def end_plan(self, plan: SchedulerOutput) -> None:
        """Adds the copies to a plan that will be executed."""
        copied = [(tier, *tier.end_plan()) for tier in self.tiers]
        _, plan.saved_blocks, plan.saved_host_blocks, plan.loaded_blocks, plan.loaded_host_blocks = copied[0]
        for _, *fields in copied[1:]:
            plan.saved_states, plan.saved_host_states, plan.loaded_states, plan.loaded_host_states = fields
        if any(saved or loaded for _, saved, _, loaded, _ in copied):
            self._in_flight[plan.step] = [(tier, saved, loaded) for tier, _, saved, _, loaded in copied]

    def end_step(self, step: int) -> list[tuple[PoolTier, int]]:
        """The results of a plan are back, and its failed requests were discarded.

        Returns:
            The host blocks that it has filled, which stay pinned once.
        """
        filled = []
        for tier, saved, loaded in self._in_flight.pop(step, ()):
            filled += [(tier, index) for index in saved]
            for index in loaded:
                tier.host.unpin(index)
        return filled

    def is_being_saved(self, tier: PoolTier, index: int) -> bool:
        """Whether a plan fills a host block, and its results are not back."""
        in_flight = (copies for plan in self._in_flight.values() for copies in plan)
        return index in tier.saves or any(each is tier and index in saved for each, saved, _ in in_flight)

    # ------------------------------------------------------------------------------------------------------ tables

    def pin_for(self, table: BlockTable, tier: PoolTier, index: int) -> None:
        """Keeps a host block for a waiting request until `release`."""
        tier.host.pin(index)
        self._table_pins.setdefault(table, []).append((tier, index))

    @property
    def keeps_for_requests(self) -> bool:
        """Whether host blocks are kept for waiting requests."""
        return bool(self._table_pins)

    def release(self, table: BlockTable) -> None:
        """Ends all `pin_for` of a table."""
        for tier, index in self._table_pins.pop(table, ()):
            tier.host.unpin(index)

    def cancel_loads(self, table: BlockTable) -> None:
        """Drops the loads of a table that is freed while the plan is being made."""
        for tier in self.tiers:
            if tier.loads:
                tier.cancel_loads(table)

    # ---------------------------------------------------------------------------------------------------- contents

    def host_block(self, tier: PoolTier, index: int) -> HostBlock | None:
        """A host block with its key, as connectors name it; None if its contents have been discarded."""
        key = tier.host.key_of(index)
        return None if key is None else HostBlock(connector_key(key, is_state=tier.is_state), index, tier.is_state)

    def tier_of(self, block: HostBlock) -> PoolTier:
        """The tier that a host block belongs to."""
        return self.states if block.is_state and self.states is not None else self.blocks

    def discard(self, block_keys: list[BlockKey], state_keys: list[BlockKey]) -> None:
        """Forgets contents that may be wrong. Their blocks and slots have lost their hashes."""
        self.blocks.discard(block_keys)
        if self.states is not None:
            self.states.discard(state_keys)
        keys = [connector_key(key, is_state=True) for key in state_keys] if self.states is not None else []
        for listener in self.listeners:
            listener.contents_discarded(block_keys + keys)

    def clear(self) -> None:
        """Forgets all contents, between two plans."""
        for listener in self.listeners:
            listener.clearing()
        for tier in self.tiers:
            tier.clear()

    def check_integrity(self, others: Iterable[tuple[PoolTier, int]] = ()) -> None:
        """Raises AssertionError unless pins and contents agree.

        Args:
            others: Further pins: of host blocks that connectors read or fill.
        """
        pins: dict[PoolTier, dict[int, int]] = {tier: {} for tier in self.tiers}
        users = [*others, *(pin for each in self._table_pins.values() for pin in each)]
        for tier in self.tiers:
            users += [(tier, index) for index in tier.saves]
            users += [(tier, index) for pairs in tier.loads.values() for index, _ in pairs]
        for copies in self._in_flight.values():
            users += [(tier, index) for tier, saved, loaded in copies for index in (*saved, *loaded)]
        for tier, index in users:
            pins[tier][index] = pins[tier].get(index, 0) + 1
        for tier in self.tiers:
            tier.host.check_integrity(pins[tier])

    def _make_tier(
        self, pool: BlockPool, unconfirmed: UnconfirmedBlockHashes, num_blocks: int, *, is_state: bool
    ) -> PoolTier:
        return PoolTier(
            pool,
            HostBlockPool(num_blocks),
            unconfirmed,
            is_state=is_state,
            max_saves=self._max_saves[is_state],
            saves_evicted=self._saves_evicted,
        )

    def add_confirmed(self, writers: Mapping[int, BlockTable]) -> None:
        for number in writers:
            if number >= 0:
                self.blocks.add_confirmed(number)
            elif self.states is not None:
                self.states.add_confirmed(~number)


def connector_key(key: BlockKey, *, is_state: bool) -> BlockKey:
    """The key by which connectors know the contents of a block, or of a state slot, with this hash."""
    return key + _STATE_SUFFIX if is_state else key


def tier_key(key: BlockKey) -> tuple[BlockKey, bool]:
    """The hash of a connector's key, and whether it names a state."""
    return (key[:-2], True) if key.endswith(_STATE_SUFFIX) and len(key) == 34 else (key, False)
