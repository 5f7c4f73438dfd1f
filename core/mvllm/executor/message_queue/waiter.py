"""Waiter, which waits in one poll() for data, the death of a peer, and the stop signal; and AdaptiveSpin.

Data has priority: messages that a peer sent before its death are delivered.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Sequence

from mvllm.executor.message_queue.errors import QueueStoppedError
from mvllm.executor.message_queue.notifier import StopSignal
from mvllm.executor.message_queue.peers import Peer

POLL_SECONDS = 0.2  # interval of looking up a peer without a descriptor


def deadline_after(timeout: float | None) -> float | None:
    """The moment `timeout` seconds from now, by time.monotonic()."""
    return None if timeout is None else time.monotonic() + timeout


class Waiter:
    """Waits for any of a fixed set of descriptors.

    Args:
        queue: The queue's name, for errors.
        peers: The processes whose death ends the wait, except dropped ones.
        stop: Ends the wait as well, or None.
    """

    def __init__(self, queue: str, peers: Sequence[Peer], stop: StopSignal | None) -> None:
        self._queue = queue
        self._peers = peers
        self._stop = stop
        self._poll = select.poll()
        self._watched: dict[int, Peer] = {}
        self._data: set[int] = set()
        self._is_up_to_date = False  # all peers are in the poll set or dropped, and none is dead
        if stop is not None:
            self._poll.register(stop.fd, select.POLLIN)
        for peer in peers:
            peer.observe(self._invalidate)

    def add(self, fd: int) -> None:
        """Adds a data descriptor."""
        self._poll.register(fd, select.POLLIN)
        self._data.add(fd)

    def remove(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._data.remove(fd)

    def wait(self, deadline: float | None, waiting_for: str) -> list[int]:
        """Blocks until a data descriptor is readable; returns those that are, or [] at the deadline.

        Raises:
            QueueStoppedError: The stop signal is set and there is no data.
            PeerDiedError: A peer has ended and there is no data.
        """
        if self._is_up_to_date:  # the fast path: no peer has changed
            limit = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
            data = [fd for fd, _ in self._poll.poll(limit) if fd in self._data]
            if data:
                return data
        return self._wait_and_watch(deadline, waiting_for)

    def _wait_and_watch(self, deadline: float | None, waiting_for: str) -> list[int]:
        """As `wait`, with a look at the peers."""
        while True:
            known = self._watch_peers()
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            dead = self._dead_peers()
            self._is_up_to_date = known and not dead
            looks_up = not known and (remaining is None or remaining > POLL_SECONDS)  # peers without a descriptor
            limit = POLL_SECONDS if looks_up else remaining
            events = self._poll.poll(0 if dead else None if limit is None else limit * 1e3)
            data, stopped = self._sort(fd for fd, _ in events)
            if data:
                return data
            if stopped:
                raise QueueStoppedError(f"Queue {self._queue} was stopped while it waited for {waiting_for}.")
            if dead:
                raise dead[0].died_error(self._queue, waiting_for)
            # A peer found dead in this poll() is not reported yet: poll() checks one descriptor after the other, so its
            # last message may have arrived after the check of the data and before the check of the peer.
            if not events and limit is not None and not looks_up and not self._dead_peers():
                return []

    def _dead_peers(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.is_dead and not peer.is_dropped]

    def _invalidate(self) -> None:
        self._is_up_to_date = False

    def _sort(self, fds: Iterable[int]) -> tuple[list[int], bool]:
        data = []
        stopped = False
        for fd in fds:
            if self._stop is not None and fd == self._stop.fd:
                stopped = True
            elif fd in self._watched:
                self._watched[fd].mark_dead()
            else:
                data.append(fd)
        return data, stopped

    def _watch_peers(self) -> bool:
        """Brings the poll set up to date; returns whether every peer has a descriptor."""
        known = True
        for peer in self._peers:
            if peer.fd < 0 and not peer.is_dropped:
                peer.check_alive()
                known = known and (peer.fd >= 0 or peer.is_dead)
        wanted = {peer.fd: peer for peer in self._peers if peer.fd >= 0 and not peer.is_dropped}
        if wanted != self._watched:
            for fd in self._watched.keys() - wanted.keys():
                self._poll.unregister(fd)
            for fd in wanted.keys() - self._watched.keys():
                self._poll.register(fd, select.POLLIN)
            self._watched = wanted
        return known


class AdaptiveSpin:
    """A short spin before a sleep, as long as recent spins have saved sleeps.

    A wait that ended within the limit allows a full spin to the next wait; every other wait halves it, down to none. So
    a busy queue avoids sleeps, and an idle one uses no CPU.

    Args:
        limit: Longest spin in seconds; 0 for none.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._allowed = limit
        self._started = 0.0

    def spin(self, hint: Callable[[], bool]) -> bool:
        """Spins until `hint` is true or the allowed time is over; returns the hint. Call `ended` after the wait."""
        if self._limit == 0.0:
            return hint()
        now = self._started = time.monotonic()
        until = now + self._allowed
        while not hint():
            if time.monotonic() >= until:
                return False
            os.sched_yield()  # lets other threads of this core run
        return True

    def ended(self) -> None:
        """Records the end of the wait."""
        if self._limit == 0.0:
            return
        if time.monotonic() - self._started <= self._limit:
            self._allowed = self._limit
        else:
            self._allowed = self._allowed / 2 if self._allowed > 1e-6 else 0.0
