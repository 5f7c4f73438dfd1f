"""Requests that wait for KV connectors, and the transfers between host blocks and connectors.

    add ──> is more of its prefix in a store?   no: it starts as always
               │ yes, or not known yet
               v
            WAITING_FOR_KV ──loads have ended, failed, or take too long──> WAITING, its host blocks are kept for it
                                                                           until its first plan loads them

Connectors fill host blocks that no plan in flight uses, and read host blocks that a plan whose results are back has
filled. A failed load makes the prefix shorter: the rest is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mvllm.kv_cache.block_hash import BlockHash
from mvllm.kv_cache.block_table import BlockTable
from mvllm.kv_cache.event_recorder import HASH_BYTES
from mvllm.kv_cache.host_tier import HostTier, PoolTier, connector_key, tier_key
from mvllm.kv_cache.kv_cache_manager import KVCacheManager
from mvllm.kv_cache.listener import KVCacheListener
from mvllm.kv_cache.prefix_search import group_hash
from mvllm.kv_transfer.connector import BlockKey, HostBlock, KVRequest
from mvllm.kv_transfer.connectors import KVConnectors
from mvllm.messages.requests import EngineCoreOutput, KVTierStats
from mvllm.scheduler.request import Request, RequestStatus
from mvllm.scheduler.request_lists import RequestListener, RequestLists

MAX_WAIT_SECONDS = 60.0
"""So long a request waits for connectors. Then it computes what is missing."""

_STATS_SECONDS = 0.2
"""Sizes of tiers are asked for again after this time."""

Place = tuple[PoolTier, int]
"""A host block: its tier and its index."""


class _Wait:
    """What a request waits for.

    Attributes:
        since: When it began.
        places: Host blocks that are being filled.
        is_asking: A connector does not know yet what it has.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self.places: set[Place] = set()
        self.is_asking = False


class _Prefix:
    """What has to be loaded so that a request can start behind a longer prefix.

    Attributes:
        length: Blocks of the prefix.
        present: Host blocks with a part of it.
        filling: Host blocks that are being filled with a part of it.
        missing: Tier, key and connector of the others.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.present: list[Place] = []
        self.filling: list[Place] = []
        self.missing: list[tuple[PoolTier, BlockHash, str]] = []


class KVLoads(KVCacheListener, RequestListener):
    """Moves blocks between host blocks and connectors. Used by the scheduler, from its thread.

    Args:
        kv_cache: Has a host tier.
        requests: The unfinished requests.
        connectors: Fill and read host blocks.
        clock: Seconds, monotonic.
        block_bytes, state_bytes: Bytes of a host block of each kind, for statistics.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        requests: RequestLists,
        connectors: KVConnectors,
        clock: Callable[[], float],
        *,
        block_bytes: int = 0,
        state_bytes: int = 0,
    ) -> None:
        assert kv_cache.tier is not None
        self._kv_cache = kv_cache
        self._tier: HostTier = kv_cache.tier
        self._requests = requests
        self._connectors = connectors
        self._clock = clock
        self._bytes = block_bytes, state_bytes
        self._unchecked: deque[Request] = deque()
        self._waiting: dict[Request, _Wait] = {}
        self._loading: dict[Place, list[Request]] = {}
        self._num_saving: dict[Place, int] = {}
        self._described: dict[Place, tuple[BlockTable, int]] = {}  # loading -> a table with this block, if recorded
        self._has_recorded = False
        self._asked: set[Request] = set()
        self._params: dict[str, dict[str, Any]] = {}
        self._stats: dict[str, KVTierStats] = {}
        self._stats_time = float("-inf")
        self._tier.listeners.append(self)
        requests.listeners.append(self)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for connectors."""
        return len(self._waiting)

    @property
    def can_save(self) -> bool:
        """Whether a plan without requests would save something."""
        return self._tier.can_save

    @property
    def has_unsaved(self) -> bool:
        """Whether something is left to save, now or when connectors have read host blocks."""
        return self._tier.can_save or (self._tier.has_unsaved and bool(self._num_saving))

    def add(self, request: Request) -> None:
        """A new request."""
        if self._connectors.can_load:
            self._unchecked.append(request)

    def wait(self, timeout: float) -> None:
        """Waits until a connector has news, at most about `timeout` seconds."""
        self._connectors.wait(timeout)

    def start_plan(self) -> None:
        """Before a plan: takes the results of connectors, and looks for the prefixes of new requests."""
        if self._loading or self._num_saving:
            self._take_results()
        if self._waiting:
            self._check_waiting()
        while self._unchecked:
            request = self._unchecked[0]
            if request.status is RequestStatus.WAITING:
                wait = _Wait(self._clock())
                if not self._start(request, wait):
                    return  # there is no room until others have started
                if wait.places or wait.is_asking:
                    self._requests.wait_for_kv(request)
                    self._waiting[request] = wait
            elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
                self._unchecked.rotate(-1)
                if all(each.status is RequestStatus.WAITING_FOR_GRAMMAR for each in self._unchecked):
                    return
                continue
            self._unchecked.popleft()

    def end_step(self, step: int) -> None:
        """The results of a plan are back: connectors may store what it has saved to host blocks."""
        filled = self._tier.end_step(step)
        blocks = {place: self._tier.host_block(*place) for place in filled}
        self._start_saves([block for block in blocks.values() if block is not None])
        for tier, index in filled:
            tier.host.unpin(index)

    def cancel(self) -> None:
        """All requests stop waiting, because hashes get another root."""
        for request in list(self._waiting):
            self._stop_waiting(request)

    def contents_discarded(self, keys: list[BlockKey]) -> None:
        """Connectors forget them, too."""
        self._connectors.discard(keys)

    def clearing(self) -> None:
        """Records what connectors have, while the tokens of it are known."""
        self.record_changes()

    def record_changes(self, *, restart: bool = False) -> None:
        """Records what connectors have stored and removed as events of the KV cache, if these are recorded.

        Args:
            restart: All that the stores have is recorded again.
        """
        events = self._kv_cache.events
        if events is None or not events.records_media or not self._connectors.reports_changes:
            return
        everything, self._has_recorded = restart or not self._has_recorded, True
        for medium, change in self._connectors.take_changes(everything=everything):
            hashes = [key for key in change.keys if len(key) == HASH_BYTES]  # of the first group
            if change.is_stored:
                events.record_stored(hashes, medium)
            else:
                events.record_removed(hashes, medium)

    @property
    def reports_changes(self) -> bool:
        """Whether `record_changes` may have something to record while nothing else happens."""
        events = self._kv_cache.events
        return events is not None and events.records_media and self._connectors.reports_changes

    def add_params(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Adds what connectors tell the clients to the last outputs of requests."""
        for output in outputs:
            if output.finish_reason is not None and output.request_id in self._params:
                output.kv_transfer_params = self._params.pop(output.request_id)
        if self._params:  # of requests that were aborted, or whose last output comes later
            later = {output.request_id for output in self._requests.pending_outputs}
            self._params = {name: params for name, params in self._params.items() if name in later}

    def stats(self) -> dict[str, KVTierStats]:
        """Sizes and counters by tier; not newer than a fraction of a second."""
        now = self._clock()
        if now - self._stats_time >= _STATS_SECONDS:
            self._stats_time = now
            host = KVTierStats()
            for tier, num_bytes in zip(self._tier.tiers, self._bytes):
                host.bytes_used += tier.host.num_used * num_bytes
                host.bytes_limit += tier.host.num_blocks * num_bytes
                host.num_loaded += tier.num_loaded
                host.num_saved += tier.num_saved
            self._stats = {"host": host, **self._connectors.stats()}
        return self._stats

    def close(self) -> None:
        """Ends the connectors. Idempotent."""
        self._connectors.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless host blocks and their users agree."""
        others = list(self._loading)
        others += self._num_saving
        self._tier.check_integrity(others)
        for request, wait in self._waiting.items():
            assert request.status is RequestStatus.WAITING_FOR_KV
            assert wait.is_asking or wait.places, "a request waits for nothing"
            assert wait.places <= self._loading.keys()

    # ------------------------------------------------------------------------------------------------------- loads

    def _check_waiting(self) -> None:
        now = self._clock()
        for request, wait in list(self._waiting.items()):
            if now - wait.since >= MAX_WAIT_SECONDS:
                self._stop_waiting(request)
            elif wait.is_asking:
                wait.is_asking = False
                if not self._start(request, wait) or not (wait.places or wait.is_asking):
                    self._stop_waiting(request)

    def _stop_waiting(self, request: Request) -> None:
        del self._waiting[request]
        self._requests.start_after_load(request)

    def _start(self, request: Request, wait: _Wait) -> bool:
        """Starts the loads of a request whose prefix is in a store. False, with nothing changed, if there is no room.

        Args:
            wait: Gets what the request has to wait for; nothing, if it can start.
        """
        for side in request.sides:
            prefix = self._find_prefix(side, wait)
            if prefix is None or wait.is_asking:
                continue
            if not self._start_loads(side, prefix, request, wait):
                if self._tier.keeps_for_requests or self._loading:
                    return bool(wait.places)  # of the other side
                # A shorter prefix, of which the host blocks can hold every part.
                room = min(tier.host.num_available for tier in self._tier.tiers if tier.host.num_blocks)
                shorter = self._find_prefix(side, wait, most=max(0, room // self._kv_cache.num_groups - 1))
                if shorter is not None:
                    self._start_loads(side, shorter, request, wait)
        return True

    def _find_prefix(self, side: Request, wait: _Wait, most: int | None = None) -> _Prefix | None:
        """The longest prefix that connectors can complete; None if that is no longer than what is there.

        Args:
            most: Most blocks of the prefix.
        """
        kv_cache, table = self._kv_cache, side.table
        if side.needs_every_position or table.root is None:
            return None
        num_blocks = (len(table.token_ids) - 1) // kv_cache.block_size
        keys = kv_cache.keys_of(table, num_blocks if most is None else min(most, num_blocks))
        num_here = len(kv_cache.get_computed_blocks(table)) // kv_cache.num_groups
        if num_here >= len(keys):
            return None
        hashes, state_tier = table.block_hashes[: len(keys)], self._tier.states
        self._asked.add(side)
        source = self._connectors.lookup(self._kv_request(side), self._keys_elsewhere(keys, hashes))
        if source is None:
            wait.is_asking = True
            return None

        def find_block(key: BlockHash) -> int | None:
            return 0 if key in source or self._is_here(self._tier.blocks, key) else None

        length = len(kv_cache.search.find(hashes, find_block)) // kv_cache.num_groups
        if kv_cache.states is not None and state_tier is not None:
            length = self._last_snapshot(hashes[:length], source, state_tier, find_block)
        if length <= num_here:
            return None
        prefix = _Prefix(length)
        for group, i in kv_cache.search.needed(length):
            self._add_part(prefix, self._tier.blocks, group_hash(hashes[i], group), source)
        if state_tier is not None:
            self._add_part(prefix, state_tier, hashes[length - 1], source)
        return prefix

    def _keys_elsewhere(self, keys: Sequence[Sequence[BlockHash]], hashes: Sequence[BlockHash]) -> list[BlockKey]:
        """The keys of blocks and states that are neither on the device nor in host blocks, nor on the way there.

        Args:
            keys: By block, those of all groups.
            hashes: The hash of each block, which names a state.
        """
        has_states, state_tier = self._kv_cache.states is not None, self._tier.states
        found: list[BlockKey] = []
        for block_hash, of_groups in zip(hashes, keys):
            found += [key for key in of_groups if not self._is_here(self._tier.blocks, key)]
            if has_states and state_tier is not None and not self._is_here(state_tier, block_hash):
                found.append(connector_key(block_hash, is_state=True))
        return found

    def _last_snapshot(
        self,
        hashes: Sequence[BlockHash],
        source: dict[BlockKey, str],
        state_tier: PoolTier,
        find_block: Callable[[BlockHash], int | None],
    ) -> int:
        """The longest prefix that ends at a snapshot, and whose blocks exist."""
        search, num_groups = self._kv_cache.search, self._kv_cache.num_groups
        for count in range(len(hashes), 0, -1):
            name = hashes[count - 1]
            if connector_key(name, is_state=True) in source or self._is_here(state_tier, name):
                if len(search.find(hashes[:count], find_block)) == count * num_groups:
                    return count
        return 0

    def _is_here(self, tier: PoolTier, key: BlockHash) -> bool:
        """Whether contents are on the device, in a host block, or on the way to one."""
        if tier.pool.get_cached_block(key) is not None:
            return True
        return tier.host.get(key) is not None or tier.host.get_filling(key) is not None

    def _add_part(self, prefix: _Prefix, tier: PoolTier, key: BlockHash, source: dict[BlockKey, str]) -> None:
        if tier.pool.get_cached_block(key) is not None:
            return
        if (index := tier.host.get(key)) is not None:
            prefix.present.append((tier, index))
        elif (index := tier.host.get_filling(key)) is not None:
            prefix.filling.append((tier, index))
        else:
            prefix.missing.append((tier, key, source[connector_key(key, is_state=tier.is_state)]))

    def _start_loads(self, side: Request, prefix: _Prefix, request: Request, wait: _Wait) -> bool:
        """Starts loads. False, with nothing changed, if there are not enough host blocks."""
        for place in (*prefix.present, *prefix.filling):
            self._tier.pin_for(side.table, *place)
        if any(
            sum(each is tier for each, _, _ in prefix.missing) > tier.host.num_available for tier in self._tier.tiers
        ):
            self._tier.release(side.table)
            return False
        loads: dict[str, list[HostBlock]] = {}
        events, table = self._kv_cache.events, side.table
        numbers: dict[BlockHash, int] = {}
        if events is not None and events.records_media:
            numbers = {block_hash: i for i, block_hash in enumerate(table.block_hashes)}
        for tier, key, name in prefix.missing:
            index = tier.host.allocate(key)
            assert index is not None
            self._tier.pin_for(side.table, tier, index)
            self._loading[tier, index] = []
            if key in numbers and not tier.is_state:
                self._described[tier, index] = table, numbers[key]
            prefix.filling.append((tier, index))
            loads.setdefault(name, []).append(
                HostBlock(connector_key(key, is_state=tier.is_state), index, tier.is_state)
            )
        for place in prefix.filling:
            self._loading[place].append(request)
            wait.places.add(place)
        self._connectors.start_load(self._kv_request(side), loads)
        return True

    def _take_results(self) -> None:
        """Applies the transfers that have ended."""
        results = self._connectors.poll()
        self.record_changes()  # before host blocks can be evicted, from which the tokens are known
        for result in results:
            place = self._tier.tier_of(result.block), result.block.index
            if result.is_load:
                self._end_load(place, ok=result.ok)
            else:
                self._num_saving[place] -= 1
                if not self._num_saving[place]:
                    del self._num_saving[place]
                    place[0].host.unpin(place[1])

    def _end_load(self, place: Place, *, ok: bool) -> None:
        tier, index = place
        requests = self._loading.pop(place)
        described = self._described.pop(place, None)
        if ok:
            if described is not None and self._kv_cache.events is not None and tier.host.key_of(index) is not None:
                self._kv_cache.events.describe(*described)
            tier.host.publish(index)
        elif (key := tier.host.key_of(index)) is not None:
            tier.host.discard([key])
        tier.host.unpin(index)
        for request in requests:
            wait = self._waiting.get(request)
            if wait is not None and place in wait.places:
                wait.places.discard(place)
                if not wait.places and not wait.is_asking:
                    self._stop_waiting(request)

    # ------------------------------------------------------------------------------------------------------- saves

    def _start_saves(self, blocks: Sequence[HostBlock], names: Sequence[str] | None = None) -> None:
        """Lets connectors store host blocks, which stay pinned until all have."""
        for block in self._connectors.start_save(blocks, names) if blocks else ():
            place = self._tier.tier_of(block), block.index
            if place not in self._num_saving:
                self._num_saving[place] = 0
                place[0].host.pin(block.index)
            self._num_saving[place] += 1

    # --------------------------------------------------------------------------------------------- ends of requests

    def request_ended(self, request: Request) -> None:
        """A request ends, and still has its blocks."""
        self._waiting.pop(request, None)
        for side in request.sides:
            num_computed = min(side.num_computed_tokens, len(side.token_ids), side.table.num_slots)  # 0 if it failed
            num_blocks = num_computed // self._kv_cache.block_size
            by_block = self._kv_cache.keys_of(side.table, num_blocks)
            keys = [key for of_groups in by_block for key in of_groups]
            if self._tier.states is not None:
                hashes = side.table.block_hashes[: len(by_block)]
                keys += [
                    connector_key(name, is_state=True) for name in hashes if self._is_here(self._tier.states, name)
                ]
            params, names = self._connectors.request_finished(self._kv_request(side), keys)
            if side is request and names:
                self._params[request.request_id] = params
                self._save_again(keys, names)
            self._asked.discard(side)

    def _save_again(self, keys: Sequence[BlockKey], names: Sequence[str]) -> None:
        """Lets connectors that have told a client of these keys store them, also if they have stored them before."""
        here = []
        for key in keys:
            name, is_state = tier_key(key)
            tier = self._tier.states if is_state and self._tier.states is not None else self._tier.blocks
            index = tier.host.get(name)
            if index is None:
                tier.add_key(name)
            elif not self._tier.is_being_saved(tier, index):
                here.append(HostBlock(key, index, is_state))
        self._start_saves(here, names)

    def _kv_request(self, side: Request) -> KVRequest:
        return KVRequest(side.request_id, side.data.kv_transfer_params or {})
