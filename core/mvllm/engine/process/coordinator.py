"""The data parallel coordinator's process.

Started by `child_program` with the arguments `<name> <control socket> <parent pid>`.

    engine core ── its load ──────────────────────────────> DPCoordinator ──> every front end
    front end ──── prompt prefixes it sent, by replica ───> DPCoordinator ──> every other front end

Without it, several front ends that balance requests over the same replicas would all choose the same one. It sleeps in
the kernel while nothing changes, apart from a heartbeat every second, and publishes loads at most every
`PUBLISH_SECONDS`.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from mvllm.engine.process.launch import ChildProcess, CoreHandle
from mvllm.engine.process.message_socket import MessageSocket
from mvllm.executor.process.activity_table import IDLE, ActivityTable
from mvllm.executor.process.child_startup import run_child
from mvllm.executor.process.handshake import ChildStartArgs, Handshake, send_message
from mvllm.messages.coordinator_protocol import CoreLoad, CoreLoads, FromFrontEnd, SentPrefixes, SleepDone, SleepNotice

PUBLISH_SECONDS = 0.05
HEARTBEAT_INTERVAL_SECONDS = 1.0
_MAX_LOADS_PER_MESSAGE = 256
NAME = "DPCoordinator"


class CoordinatorStartArgs(ChildStartArgs, frozen=True, kw_only=True):
    """What the coordinator process is started with.

    Attributes:
        core_fds: A socket to each engine core.
        front_end_fds: A socket to each front end.
    """

    core_fds: list[int]
    front_end_fds: list[int]


class CoordinatorHandle(CoreHandle):
    """The handle of the coordinator process in its parent."""

    module = "mvllm.engine.process.coordinator"


class CoordinatorChildProcess(ChildProcess):
    """The coordinator process.

    Args:
        core_fds, front_end_fds: The coordinator's ends of the socket pairs, which it inherits.
    """

    def __init__(self, core_fds: Sequence[int], front_end_fds: Sequence[int]) -> None:
        start = CoordinatorStartArgs(name=NAME, core_fds=list(core_fds), front_end_fds=list(front_end_fds))
        super().__init__(start, [*core_fds, *front_end_fds], CoordinatorHandle)


class DPCoordinator:
    """Forwards messages between engine cores and front ends.

    Args:
        cores: The sockets to engine cores.
        front_ends: The sockets to front ends, by index.
    """

    def __init__(self, cores: Sequence[MessageSocket], front_ends: Sequence[MessageSocket]) -> None:
        self._cores = {core.fd: core for core in cores}
        self._front_ends = list(front_ends)
        self._index = {front_end.fd: index for index, front_end in enumerate(front_ends)}
        self._poll = select.poll()
        for peer in (*cores, *front_ends):
            self._poll.register(peer.fd, select.POLLIN)
        self._loads: dict[int, CoreLoad] = {}
        self._unpublished_ranks: list[set[int]] = [set() for _ in front_ends]
        # Messages that must be delivered and did not fit into the socket's buffer yet, by front end.
        self._undelivered: list[deque[SleepNotice | SleepDone]] = [deque() for _ in front_ends]
        self._disconnected: set[int] = set()  # indices of front ends
        self._published_at = 0.0
        # The caller of each SleepNotice (index, its id), and the front ends that have not answered it.
        self._pending_sleeps: dict[tuple[int, int], set[int]] = {}
        self._forwarded: dict[int, tuple[int, int]] = {}  # the caller, by the id of the forwarded SleepNotice
        self._num_forwarded = 0
        self._load_decoder = msgspec.msgpack.Decoder(CoreLoad)
        self._front_end_decoder: msgspec.msgpack.Decoder[FromFrontEnd] = msgspec.msgpack.Decoder(FromFrontEnd)

    def run_once(self, seconds: float | None = None) -> None:
        """Waits for messages, or until loads are to be published, and handles them.

        Args:
            seconds: The longest wait; None for no limit.
        """
        timeout = None if seconds is None else seconds * 1e3
        if any(self._unpublished_ranks):
            timeout = max(0.0, self._published_at + PUBLISH_SECONDS - time.monotonic()) * 1e3
        elif any(self._undelivered):
            timeout = PUBLISH_SECONDS * 1e3
        for fd, event in self._poll.poll(timeout):
            if event & ~select.POLLIN:
                self._poll.unregister(fd)  # its other end is closed; the parent process handles that
            if (core := self._cores.get(fd)) is not None:
                self._read_core(core)
            else:
                self._read_front_end(self._index[fd])
                if event & ~select.POLLIN:
                    self._remove_front_end(self._index[fd])
        for index in range(len(self._undelivered)):
            self._deliver(index)
        if any(self._unpublished_ranks) and time.monotonic() - self._published_at >= PUBLISH_SECONDS:
            self._publish()

    def _read_core(self, core: MessageSocket) -> None:
        while (data := core.receive()) is not None:
            load = self._load_decoder.decode(data)
            self._loads[load.rank] = load
            for index, ranks in enumerate(self._unpublished_ranks):
                if index not in self._disconnected:
                    ranks.add(load.rank)

    def _publish(self) -> None:
        self._published_at = time.monotonic()
        for front_end, ranks in zip(self._front_ends, self._unpublished_ranks):
            batch = sorted(ranks)[:_MAX_LOADS_PER_MESSAGE]
            if batch and front_end.send(CoreLoads([self._loads[rank] for rank in batch])):
                ranks.difference_update(batch)  # other ranks, and front ends with full buffers, are served next time

    def _read_front_end(self, source: int) -> None:
        while (data := self._front_ends[source].receive()) is not None:
            message = self._front_end_decoder.decode(data)
            match message:
                case SentPrefixes():
                    for index, front_end in enumerate(self._front_ends):
                        if index != source:
                            front_end.send(message)
                case SleepNotice():
                    self._forward_sleep(source, message)
                case SleepDone():
                    self._record_sleep_done(source, message.id)

    def _forward_sleep(self, source: int, message: SleepNotice) -> None:
        self._num_forwarded += 1
        number = self._num_forwarded
        caller = (source, message.id)
        self._forwarded[number] = caller
        others = set(range(len(self._front_ends))) - self._disconnected - {source}
        self._pending_sleeps[caller] = others
        for index in others:
            self._undelivered[index].append(SleepNotice(number, message.is_sleeping))
        self._reply_if_complete(number)

    def _record_sleep_done(self, source: int, number: int) -> None:
        caller = self._forwarded.get(number)
        if caller is not None:
            self._pending_sleeps[caller].discard(source)
            self._reply_if_complete(number)

    def _reply_if_complete(self, number: int) -> None:
        source, id_ = caller = self._forwarded[number]
        if not self._pending_sleeps[caller]:
            del self._forwarded[number], self._pending_sleeps[caller]
            if source not in self._disconnected:
                self._undelivered[source].append(SleepDone(id_))

    def _deliver(self, index: int) -> None:
        """Sends the undelivered messages of a front end that fit into its socket's buffer."""
        messages, front_end = self._undelivered[index], self._front_ends[index]
        while messages and front_end.send(messages[0]):
            messages.popleft()

    def _remove_front_end(self, index: int) -> None:
        """Forgets a front end that has exited: no `sleep` waits for its answer."""
        self._disconnected.add(index)
        self._undelivered[index].clear()
        self._unpublished_ranks[index].clear()
        for number in list(self._forwarded):
            self._record_sleep_done(index, number)


def main() -> None:
    """The program. Never returns."""
    run_child(CoordinatorStartArgs, _run)


def _run(start: CoordinatorStartArgs, control: socket.socket, table: ActivityTable) -> NoReturn:
    coordinator = DPCoordinator(
        [MessageSocket(fd) for fd in start.core_fds], [MessageSocket(fd) for fd in start.front_end_fds]
    )
    table.write(0, IDLE)
    send_message(control, Handshake())
    while True:
        coordinator.run_once(HEARTBEAT_INTERVAL_SECONDS)
        table.write(0, IDLE)  # the heartbeat that its parent checks


if __name__ == "__main__":
    main()
