"""Host blocks that a producer holds for requests that another engine continues.

    expect(request, keys) ──> waiting for its blocks ──add(block)──> held ──fetched, too old, too many──> released

A block is held for each request that needs it, and while somebody reads it. The connector has not ended its save until
then, so that core keeps its contents.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from mvllm.extension_api.kv_transfer import BlockKey, HostBlock

_MAX_REQUESTS = 4096


class _Request:
    """One request: `waiting` are keys whose blocks are not in host memory yet, `held` those that are."""

    def __init__(self, waiting: set[BlockKey], deadline: float) -> None:
        self.waiting = waiting
        self.held: set[BlockKey] = set()
        self.deadline = deadline


class _Entry:
    """One held block."""

    def __init__(self, block: HostBlock) -> None:
        self.block = block
        self.num_saves = 1
        self.requests: set[str] = set()
        self.num_readers = 0
        self.is_discarded = False


class HeldBlocks:
    """The held blocks. Used from any thread.

    Args:
        max_blocks, max_states: Most blocks, and states, that are held at once. Those of the oldest request are released
            first.
        seconds: Time after which a request's blocks are released, if nobody has fetched them.
        on_release: Called, from any thread, with each block that is not used any more, once for each time that it was
            added.
        on_change: Called, from any thread, when `waits_for` may have changed.
        now: A monotonic clock.
    """

    def __init__(
        self,
        max_blocks: int,
        max_states: int,
        seconds: float,
        on_release: Callable[[HostBlock], None],
        on_change: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = {False: max_blocks, True: max_states}
        self._seconds = seconds
        self._on_release = on_release
        self._on_change = on_change
        self._now = now
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # oldest first
        self._entries: dict[BlockKey, _Entry] = {}
        self._counts = {False: 0, True: 0}
        self._lock = threading.RLock()

    @property
    def num_held(self) -> int:
        """Blocks and states that are held."""
        return len(self._entries)

    def expect(self, request_id: str, keys: Sequence[BlockKey]) -> None:
        """Begins to hold the blocks of a finished request: those that are there, and others when they are added."""
        with self._lock:
            self._release_request(request_id)
            while len(self._requests) >= _MAX_REQUESTS:
                self._release_request(next(iter(self._requests)))
            request = self._requests[request_id] = _Request(set(keys), self._now() + self._seconds)
            for key, is_there in zip(keys, self.find(keys)):
                if is_there:
                    self._hold(request_id, request, key)

    def add(self, block: HostBlock) -> bool:
        """Holds a block if a request needs it. Returns whether it is held; otherwise it is not used."""
        with self._lock:
            entry = self._entries.get(block.key)
            if entry is not None:
                if entry.block != block or entry.is_discarded:
                    return False  # such as a second host block with the same contents
                entry.num_saves += 1
                return True
            waiting = [(name, request) for name, request in self._requests.items() if block.key in request.waiting]
            if not waiting:
                return False
            if not self._make_room(block.is_state, {name for name, _ in waiting}):
                for _, request in waiting:
                    request.waiting.discard(block.key)
                self._on_change()
                return False
            self._entries[block.key] = _Entry(block)
            self._counts[block.is_state] += 1
            for name, request in waiting:
                self._hold(name, request, block.key)
            self._on_change()
            return True

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks are there."""
        with self._lock:
            entries = map(self._entries.get, keys)
            return [entry is not None and not entry.is_discarded for entry in entries]

    def waits_for(self, request_id: str, keys: Sequence[BlockKey]) -> bool:
        """Whether a block of the request is expected, and not there yet."""
        with self._lock:
            request = self._requests.get(request_id)
            return request is not None and not request.waiting.isdisjoint(keys)

    def begin_read(self, key: BlockKey, is_state: bool) -> HostBlock | None:
        """The block, which stays until `end_read`; None if it is not there."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.is_discarded or entry.block.is_state is not is_state:
                return None
            entry.num_readers += 1
            return entry.block

    def end_read(self, key: BlockKey, request_id: str, *, was_fetched: bool) -> None:
        """Ends a `begin_read`. A block that was fetched is not held for this request any more."""
        with self._lock:
            entry = self._entries[key]
            entry.num_readers -= 1
            request = self._requests.get(request_id)
            if was_fetched and request is not None and key in request.held:
                request.held.discard(key)
                entry.requests.discard(request_id)
                if not request.held and not request.waiting:
                    del self._requests[request_id]
            self._release_if_unused(key, entry)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Stops holding these blocks, whose contents are not to be used."""
        with self._lock:
            for request in self._requests.values():
                request.waiting.difference_update(keys)
                request.held.difference_update(keys)
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.is_discarded = True
                    entry.requests.clear()
                    self._release_if_unused(key, entry)
            self._on_change()

    def is_held(self, key: BlockKey) -> bool:
        """Whether a block that is being read may still be used."""
        return self.find([key])[0]

    def release(self, request_id: str) -> None:
        """Stops holding blocks for a request; unknown ones are ignored."""
        with self._lock:
            self._release_request(request_id)

    def release_expired(self) -> float | None:
        """Releases the requests whose time is over. Returns seconds until the next one; None without any."""
        with self._lock:
            while self._requests:
                name, request = next(iter(self._requests.items()))
                remaining = request.deadline - self._now()
                if remaining > 0:
                    return remaining
                self._release_request(name)
            return None

    def release_all(self) -> None:
        """Stops holding blocks; those that somebody reads stay until the reader ends."""
        with self._lock:
            for name in list(self._requests):
                self._release_request(name)

    def check_integrity(self) -> None:
        """Asserts that entries, requests and counts agree."""
        with self._lock:
            for key, entry in self._entries.items():
                assert entry.requests or entry.num_readers, f"{key!r} is held for nobody"
                assert all(key in self._requests[name].held for name in entry.requests)
            for name, request in self._requests.items():
                assert all(name in self._entries[key].requests for key in request.held)
            for is_state in (False, True):
                assert self._counts[is_state] == sum(e.block.is_state is is_state for e in self._entries.values())
                assert self._counts[is_state] <= self._limits[is_state]

    # --- with the lock held

    def _hold(self, name: str, request: _Request, key: BlockKey) -> None:
        request.waiting.discard(key)
        request.held.add(key)
        self._entries[key].requests.add(name)

    def _make_room(self, is_state: bool, kept: set[str]) -> bool:
        """Releases the oldest requests, other than `kept`, until one more block may be held."""
        for name in list(self._requests):
            if self._counts[is_state] < self._limits[is_state]:
                break
            if name not in kept:
                self._release_request(name)
        return self._counts[is_state] < self._limits[is_state]

    def _release_request(self, name: str) -> None:
        request = self._requests.pop(name, None)
        if request is None:
            return
        for key in request.held:
            entry = self._entries[key]
            entry.requests.discard(name)
            self._release_if_unused(key, entry)
        if request.waiting:
            self._on_change()

    def _release_if_unused(self, key: BlockKey, entry: _Entry) -> None:
        if entry.requests or entry.num_readers:
            return
        del self._entries[key]
        self._counts[entry.block.is_state] -= 1
        for _ in range(entry.num_saves):
            self._on_release(entry.block)
