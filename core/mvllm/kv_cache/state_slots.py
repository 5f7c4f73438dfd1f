"""Allocates state slots to requests, and keeps snapshots of states that other requests can start from.

Layers such as Mamba-2 or gated DeltaNet keep a *state* of a sequence, which each step overwrites. A *slot* is an index
of the state tensors, the same in all layers. A step reads a slot and writes a slot, so a snapshot costs no copy:

    step          1          2          3          4                       5
    tokens        0..255     256..511   512..639   640..767                768
    reads         zeros      slot 7     slot 7     slot 2                  slot 2
    writes        slot 7     slot 7     slot 2     slot 2                  slot 2
                                        slot 7 is the snapshot of 512 tokens: it has the hash of the block that ends
                                        there, is never written again, and any number of requests may read it

Slots are a BlockPool, with the hash of the block that ends at a snapshot's position. So an unused snapshot stays until
its slot is needed, and the oldest is evicted first.

Plans are executed in order, but the rows of one step run at the same time. Therefore

- a snapshot can be found from the next plan on, not in the plan that writes it;
- a slot that a plan reads is not written in this plan: its users keep it until all rows have their slots (`assign`).

Snapshots are made where a later request may continue: at multiples of an interval, at the end of the prompt, and where
another prompt has left this one. Steps end at these positions. A running request can always go on without a free slot,
because it overwrites its own: then it leaves no snapshot.

A waiting request waits for a snapshot that an earlier running request is going to write. So equal prompts that arrive
together are computed once. It does not wait for a few tokens, and only while that request runs and advances. That one
never waits for a later one.

A step with draft tokens leaves a state behind its known tokens and behind each draft token, in a slot each. When its
results are back, the request goes on with the one behind the last accepted token, and the other slots are freed:

    tokens        known     draft     draft     draft
    writes        slot 2    slot 5    slot 6    slot 8       two draft tokens are accepted: the next step reads slot 6

If the next step is planned before these results are back, it reads BEHIND_ACCEPTED, which the worker knows, and writes
slot 2 again. The slots of the draft tokens are freed when the results are back: a plan that writes them is executed
later. Such a step never comes to a snapshot: its position would have to be known.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from mvllm.kv_cache.block_hash import BlockHash
from mvllm.kv_cache.block_pool import BlockPool
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.host_tier import HostTier, PoolTier
from mvllm.kv_cache.request_state_slots import NO_POSITION, AwaitedSnapshot, RequestStateSlots
from mvllm.kv_cache.unconfirmed_block_hashes import UnconfirmedBlockHashes
from mvllm.messages.scheduler_output import BEHIND_ACCEPTED

LEAST_DISTANCE = 64
"""Default of StateSlots."""

_PATIENCE = 4
"""In so many plans a request may stand still while another one waits for its snapshot: it may be held back as a long
prompt that waits for other long prompts, and the one that waits may be short."""

_MOST_PROMPT_SNAPSHOTS = 8
"""Most snapshots of one prompt besides those at multiples of the interval: each one ends a step."""


class SnapshotOffers:
    """What the running requests offer to one that starts.

    Attributes:
        wanted: Requests, and the positions at which they should leave a snapshot; the last one is the best.
        shared_end: Leading tokens in common with cached blocks, or with the prompt of a running request, if none of the
            snapshots covers them; otherwise 0.
        computed: Running requests whose prompts are computed, which offer nothing.
    """

    def __init__(self, num_shared_tokens: int) -> None:
        self.wanted: list[tuple[BlockTable, int]] = []
        self.shared_end = num_shared_tokens
        self.computed: list[BlockTable] = []


class StateSlots:
    """Owner of all state slots. Used by the KVCacheManager and by the step planner.

    Args:
        num_slots: At least 1.
        block_size: Tokens per KV cache block. Snapshots are at multiples of it.
        interval: Tokens between two regular snapshots, rounded up to blocks; 0 for none.
        unconfirmed: Records the hashes of snapshots like those of blocks. Slot s has the number ~s.
        hashes_of: The hashes of the first blocks of a table, whose tokens are known; fewer if not all may be shared.
        least_distance: A snapshot at the end of a prompt is at least so many tokens behind the one before it, and a
            request waits for at least so many tokens, or for an interval. Both hold for requests without siblings.
        host_tier: Keeps snapshots in host memory; None for the device alone.

    Attributes:
        tier: The host blocks of snapshots; None without a host tier.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        block_size: int,
        interval: int,
        unconfirmed: UnconfirmedBlockHashes,
        hashes_of: Callable[[BlockTable, int], list[BlockHash]],
        least_distance: int = LEAST_DISTANCE,
        host_tier: HostTier | None = None,
    ) -> None:
        self._pool = BlockPool(num_slots)
        self.tier: PoolTier | None = None
        if host_tier is not None:
            self.tier = host_tier.attach_states(self._pool, unconfirmed)
        self._block_size = block_size
        self._interval = -(-interval // block_size) * block_size
        self._unconfirmed = unconfirmed
        self._hashes_of = hashes_of
        self._least_distance = least_distance
        self._with_pending: dict[BlockTable, None] = {}
        self._num_plans = 0
        self._computing: dict[BlockTable, None] = {}  # running requests that compute their prompt, and some that did

    # ----------------------------------------------------------------------------------------------------- queries

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Slots that no request uses. Some of them may hold snapshots."""
        return self._pool.num_free

    def snapshot_lengths(self, hashes: Sequence[BlockHash]) -> Iterator[int]:
        """Numbers of leading blocks behind which there is a snapshot, the longest first."""
        return (count for count in range(len(hashes), 0, -1) if self.has_snapshot(hashes[count - 1]))

    def has_snapshot(self, name: BlockHash) -> bool:
        """Whether there is a snapshot behind the block with this hash, in a slot or in a host block."""
        if self._pool.get_cached_block(name) is not None:
            return True
        return self.tier is not None and self.tier.host.get(name) is not None

    def find_offers(
        self, table: BlockTable, num_cached: int, order: tuple[int, int], num_shared_tokens: int
    ) -> SnapshotOffers:
        """Which snapshots of earlier running requests a request could start from later. No side effects.

        A request waits for none if that saves a few tokens only. Where it shares a prefix with a request that will
        leave a snapshot there, it needs no snapshot of its own.

        Args:
            num_cached: Tokens of the snapshot that it would start from now.
            order: Its place in the service order.
            num_shared_tokens: Leading tokens with cached blocks.
        """
        state, size, best = table.state, self._block_size, num_cached
        gain = 1 if state.has_siblings else min(self._least_distance, self._interval or self._least_distance)
        hashes = self._hashes_of(table, (len(table.token_ids) - 1) // size)
        offers = SnapshotOffers(num_shared_tokens)
        for writer_table in self._computing:
            writer = writer_table.state
            if writer.position >= len(writer_table.block_hashes) * size:
                offers.computed.append(writer_table)
                continue
            if not writer.order < order:
                continue
            common = _common_length(hashes, writer_table.block_hashes) * size
            offers.shared_end = max(offers.shared_end, common)
            position = self._offered_position(writer_table, common, best)
            if position > best:
                best = position
                if position - num_cached >= gain:
                    offers.wanted.append((writer_table, position))
        if offers.shared_end <= best:
            offers.shared_end = 0
        return offers

    def wait_for(self, table: BlockTable, offers: SnapshotOffers) -> None:
        """Lets a request wait for the best snapshot on offer. The writers leave all that are `wanted`."""
        for writer_table, position in offers.wanted:
            writer = writer_table.state
            if position != self._planned_position(writer_table, position):
                insort(writer.prompt_snapshots, position)
                writer.next_snapshot = min(writer.next_snapshot, position)
        writer_table, position = offers.wanted[-1]
        table.state.awaited = AwaitedSnapshot(writer_table.state, position, self._num_plans)

    def forget_computed_prompts(self, offers: SnapshotOffers) -> None:
        """Stops to look for offers of the requests whose prompts were found to be computed."""
        for table in offers.computed:
            self._computing.pop(table, None)

    def still_waits(self, state: RequestStateSlots) -> bool:
        """Whether the snapshot that a request waits for is still going to be written, and soon. No side effects."""
        awaited = state.awaited
        if awaited is None or not self._is_coming(awaited):
            return False
        return awaited.writer.position > awaited.seen or self._num_plans - awaited.plan <= _PATIENCE

    def is_impatient(self, state: RequestStateSlots) -> bool:
        """Whether a request that does not wait has waited too long for a snapshot. No side effects."""
        return state.is_impatient or (state.awaited is not None and self._is_coming(state.awaited))

    def update_wait(self, state: RequestStateSlots) -> None:
        """Records that the writer has advanced, or ends a wait that is over."""
        awaited = state.awaited
        if awaited is None:
            return
        if not self.still_waits(state):
            state.is_impatient = self.is_impatient(state)
            state.awaited = None
        elif awaited.writer.position > awaited.seen:
            awaited.seen, awaited.plan = awaited.writer.position, self._num_plans

    def _is_coming(self, awaited: AwaitedSnapshot) -> bool:
        """Whether the writer still runs, and has not come to the snapshot's position."""
        writer = awaited.writer
        return writer.slot >= 0 and writer.num_starts == awaited.num_starts and writer.position < awaited.position

    @property
    def has_computing_prompts(self) -> bool:
        """Whether there may be offers."""
        return bool(self._computing)

    def num_verifiable(self, *, num_spare: int) -> int:
        """How many draft tokens a step of a request can have. Each needs a slot.

        Args:
            num_spare: Slots that must stay free.
        """
        return max(0, self._pool.num_free - num_spare)

    # -------------------------------------------------------------------------------------------- allocate and free

    def start(self, table: BlockTable, position: int, name: BlockHash | None) -> None:
        """Gives a request a slot. The caller has checked `num_free`.

        The last free slot may be the snapshot itself, which is then overwritten.

        Args:
            position: Its first tokens, which it need not compute.
            name: Hash of their snapshot; None for position 0.
        """
        pool, state = self._pool, table.state
        state.source, state.position = -1, position
        state.awaited, state.is_impatient = None, False
        state.num_starts += 1
        if name is not None:
            snapshot = pool.get_cached_block(name)
            if snapshot is None:
                self._start_from_host(table, name)
                return
            pool.touch([snapshot])
            self._unconfirmed.record_reader(table, [~snapshot])
            state.source = snapshot
            if not pool.num_free:
                assert pool.ref_counts[snapshot] == 1
                pool.evict_for_reuse(snapshot)
                state.slot = snapshot
                return
        state.slot = pool.allocate(1)[0]

    def _start_from_host(self, table: BlockTable, name: BlockHash) -> None:
        """Gives a request a slot to which the plan loads a snapshot. The slot is its own: others load it again."""
        assert self.tier is not None
        index = self.tier.host.get(name)
        assert index is not None
        self.tier.host.pin(index)  # a snapshot that is evicted below needs a host block
        slot = table.state.slot = table.state.source = self._pool.allocate(1)[0]
        self.tier.load(table, index, slot)
        self.tier.host.unpin(index)

    def choose_positions(self, table: BlockTable, position: int, shared_end: int) -> None:
        """Chooses where the state of a request is kept that starts at `position`.

        Args:
            shared_end: Leading tokens that other requests have too, if it leaves a snapshot behind them.
        """
        state = table.state
        state.prompt_snapshots = self._positions_of(table, position, shared_end)
        state.next_snapshot = self._next_position(table, position, state.prompt_snapshots)

    def first_position(self, table: BlockTable, position: int, shared_end: int) -> int:
        """The first position that `choose_positions` would choose. No side effects."""
        return self._next_position(table, position, self._positions_of(table, position, shared_end))

    def _positions_of(self, table: BlockTable, position: int, shared_end: int) -> list[int]:
        """Where the state of a request is kept besides the multiples of the interval."""
        state, size = table.state, self._block_size
        chosen: list[int] = []
        if table.root is not None:
            if self._is_regular(table) and shared_end > position:
                chosen.append(shared_end)
            prompt_end = (state.num_prompt_tokens - 1) // size * size
            before = [each for each in chosen if each <= prompt_end]
            last = max(position, self._regular_before(table, prompt_end), *before)
            if prompt_end - last >= (1 if state.has_siblings else self._least_distance):
                insort(chosen, prompt_end)
        return chosen

    def record_prompt(self, table: BlockTable, order: tuple[int, int]) -> None:
        """Records that a request starts to run, so that others can wait for its snapshots."""
        table.state.order = order
        if table.root is not None:
            self._hashes_of(table, (len(table.token_ids) - 1) // self._block_size)  # for `find_offers`
            self._computing[table] = None

    def free(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Frees the slots of a request. Its snapshots stay.

        Args:
            num_computed_tokens: Snapshots at later positions have wrong contents.
        """
        state = table.state
        if state.slot < 0:
            return
        if state.pending:
            self._name_pending(table, num_computed_tokens)
        for slot in state.held:
            self._pool.free([slot])
        state.slot = state.source = -1
        state.position = 0
        state.draft_slots, state.older_draft_slots = [], []
        state.next_snapshot = NO_POSITION
        state.pending.clear()
        self._with_pending.pop(table, None)
        self._computing.pop(table, None)

    # ------------------------------------------------------------------------------------------------------- plans

    def start_plan(self) -> None:
        """Begins a plan: snapshots written by earlier plans get their hashes, as far as their tokens are known."""
        self._num_plans += 1
        for table in list(self._with_pending):
            self._name_pending(table, NO_POSITION)
            if not table.state.pending:
                del self._with_pending[table]

    def assign(self, tables: Sequence[BlockTable], ends: Sequence[int]) -> tuple[list[int], list[int]]:
        """Chooses the slots of a plan's rows, and makes snapshots. Once per plan, when its rows are complete.

        Slots allocated here are for later plans, so they may be among those that the plan reads.

        Args:
            tables: One per row.
            ends: Known tokens that each of them has computed with this plan.

        Returns:
            `read_slots` and `write_slots` of the plan.
        """
        reads, writes = [], []
        for table, end in zip(tables, ends, strict=True):
            state = table.state
            source, slot = state.source, state.slot
            reads.append(BEHIND_ACCEPTED if state.draft_slots else source)
            writes.append(slot)
            if state.draft_slots:
                state.older_draft_slots.append(state.draft_slots)
            state.draft_slots, state.planned_draft_slots = state.planned_draft_slots, []
            if source != slot:
                if source >= 0:
                    self._pool.free([source])
                state.source = slot
            state.position = end
            if end >= state.next_snapshot:
                self._pass_position(table)
        return reads, writes

    def reserve_draft_slots(self, state: RequestStateSlots, count: int) -> None:
        """Allocates the slots of a step's draft tokens. The caller has checked `num_verifiable`."""
        state.planned_draft_slots = self._pool.allocate(count)

    def accept_drafts(self, table: BlockTable, count: int) -> None:
        """Goes on with the state behind the last accepted draft token, or behind the known tokens if none is accepted.

        If a later step is in flight, which has read that state, its slots only become free.

        Args:
            count: Draft tokens that were accepted in the oldest step in flight with draft tokens.
        """
        state = table.state
        if state.older_draft_slots:
            slots = state.older_draft_slots.pop(0)
        else:
            slots = [state.slot, *state.draft_slots]
            state.slot = state.source = slots.pop(count)
            state.draft_slots = []
        for slot in slots:
            self._pool.free([slot])
        state.position += count
        if count and state.position >= state.next_snapshot:
            self._pass_position(table)

    # ------------------------------------------------------------------------------------------------------ hashes

    def evict(self, hashes: Iterable[BlockHash]) -> None:
        """Removes the hashes of these snapshots."""
        for name in hashes:
            slot = self._pool.get_cached_block(name)
            if slot is not None:
                self._pool.evict(slot)

    def evict_all(self) -> None:
        """Removes all hashes."""
        self._pool.evict_all()

    def forget(self, tables: Iterable[BlockTable]) -> None:
        """Removes all hashes. These requests keep their slots, and make no more snapshots."""
        self._pool.evict_all()
        self._computing.clear()
        for table in self._with_pending:  # in the same order on all ranks that make the same plans
            self._pool.free([slot for _, slot in table.state.pending])
            table.state.pending.clear()
        self._with_pending.clear()
        for table in tables:
            table.state.next_snapshot, table.state.prompt_snapshots = NO_POSITION, []
            table.state.num_starts += 1  # nobody waits for it any more

    def check_integrity(self, tables: Collection[BlockTable]) -> None:
        """Raises AssertionError unless the slots of all requests and the pool agree.

        Args:
            tables: Those of all requests with slots.
        """
        pool = self._pool
        pool.check_integrity()
        users = Counter(slot for table in tables for slot in table.state.held)
        for slot, count in enumerate(pool.ref_counts):
            assert users[slot] == count, f"State slot {slot} has {users[slot]} users, its count says {count}"
        own = [slot for table in tables for slot in table.state.written if slot >= 0]
        named = set(pool.cached_blocks())
        for slot in own:
            assert users[slot] == 1, f"State slot {slot} is written by a request and used by another one"
            assert slot not in named, f"State slot {slot} is a snapshot and is going to be written"
        for table in tables:
            state = table.state
            assert state.slot >= 0, "A request holds blocks and no state slot"
            assert state.position < state.next_snapshot, "A snapshot was missed"
            assert not state.pending or table in self._with_pending
        assert all(table in tables for table in (*self._with_pending, *self._computing))

    # ------------------------------------------------------------------------------------------------------ private

    def _is_regular(self, table: BlockTable) -> bool:
        """Whether the state is also kept for requests that are no siblings."""
        return table.root is not None and table.num_shareable_tokens == NO_POSITION

    def _regular_before(self, table: BlockTable, position: int) -> int:
        """The last multiple of the interval that is not behind `position`."""
        return position // self._interval * self._interval if self._interval and self._is_regular(table) else 0

    def _next_position(self, table: BlockTable, position: int, prompt_snapshots: Sequence[int]) -> int:
        """The first snapshot position behind `position`."""
        found = NO_POSITION
        if self._interval and self._is_regular(table):
            found = (position // self._interval + 1) * self._interval
        return min([found, *(each for each in prompt_snapshots if each > position)])

    def _planned_position(self, table: BlockTable, common: int) -> int:
        """The last position up to `common` at which a running request is going to leave a snapshot, or has left one."""
        chosen = [each for each in table.state.prompt_snapshots if each <= common]
        return max(self._regular_before(table, common), *chosen, 0)

    def _offered_position(self, table: BlockTable, common: int, best: int) -> int:
        """The last position up to `common` at which a running request could leave a snapshot, or 0.

        That is `common` itself, if it still has to compute these tokens.
        """
        state = table.state
        last = self._planned_position(table, common)
        is_ahead = common > table.num_hashed_blocks * self._block_size  # also of the plan being made
        if (
            is_ahead
            and common - max(last, best) >= self._least_distance
            and self._is_regular(table)
            and len(state.prompt_snapshots) < _MOST_PROMPT_SNAPSHOTS
        ):
            return common
        return last if last > state.position else 0

    def _pass_position(self, table: BlockTable) -> None:
        """Keeps the state of a request that has reached a snapshot position, if a slot is free to go on with."""
        state, pool = table.state, self._pool
        if state.position == state.next_snapshot and pool.num_free and not self._is_kept(table):
            pool.touch([state.slot])
            state.pending.append((state.position, state.slot))
            self._with_pending[table] = None
            state.slot = pool.allocate(1)[0]
        state.next_snapshot = self._next_position(table, state.position, state.prompt_snapshots)

    def _is_kept(self, table: BlockTable) -> bool:
        """Whether there is a snapshot with the state of a request, as far as its hashes are known."""
        count = table.state.position // self._block_size
        hashes = table.block_hashes
        return len(hashes) >= count and self._pool.get_cached_block(hashes[count - 1]) is not None

    def _name_pending(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Gives hashes to the snapshots of a request, as far as its tokens are known and computed."""
        state, known, left = table.state, min(len(table.token_ids), num_computed_tokens), []
        for position, slot in state.pending:
            if position > known or table.root is None:
                left.append((position, slot))
                continue
            count = position // self._block_size
            hashes = self._hashes_of(table, count)
            if len(hashes) == count:
                self._pool.set_hash(slot, hashes[-1])
                self._unconfirmed.writers[~slot] = table
            self._pool.free([slot])
        state.pending = left


def _common_length(some: Sequence[BlockHash], others: Sequence[BlockHash]) -> int:
    """The number of leading blocks with equal hashes. A hash depends on all tokens before it."""
    return bisect_left(range(min(len(some), len(others))), True, key=lambda i: some[i] != others[i])
