"""The data parallel coordinator's process.

Started as `python -m mvllm.engine.process.coordinator <name> <control socket> <parent pid>`.

    engine cores ── what each has to do ──> DPCoordinator ── to all of them ──> front ends
    front end ── which replica was sent which beginning of a prompt ──> DPCoordinator ──> the others

Several front ends that deal requests out to the same replicas would, each for itself, send them all to the same one.
It sleeps in the kernel while nothing changes, but for a sign of life every second, and publishes at most every
`PUBLISH_SECONDS` while something does.
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
from mvllm.messages.coordinator_protocol import CoreLoad, CoreLoads, FromFrontEnd, SentPrefixes, Sleep, SleepDone

PUBLISH_SECONDS = 0.05
HEARTBEAT_INTERVAL_SECONDS = 1.0
_MAX_LOADS_PER_MESSAGE = 256  # in a message
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
    """The process, as its parent sees it."""

    module = "mvllm.engine.process.coordinator"


class CoordinatorChildProcess(ChildProcess):
    """Starts the coordinator.

    Args:
        core_fds, front_end_fds: The coordinator's ends of the socket pairs, which are inherited.
    """

    def __init__(self, core_fds: Sequence[int], front_end_fds: Sequence[int]) -> None:
        start = CoordinatorStartArgs(name=NAME, core_fds=list(core_fds), front_end_fds=list(front_end_fds))
        super().__init__(start, [*core_fds, *front_end_fds], CoordinatorHandle)


class DPCoordinator:
    """Brings messages from one side to the other.

    Args:
        cores: Sockets to engine cores.
        front_ends: Sockets to front ends, by index.
    """

    def __init__(self, cores: Sequence[MessageSocket], front_ends: Sequence[MessageSocket]) -> None:
        self._cores = {door.fd: door for door in cores}
        self._front_ends = list(front_ends)
        self._index = {door.fd: index for index, door in enumerate(front_ends)}
        self._poll = select.poll()
        for door in (*cores, *front_ends):
            self._poll.register(door.fd, select.POLLIN)
        self._loads: dict[int, CoreLoad] = {}
        self._unpublished_ranks: list[set[int]] = [set() for _ in front_ends]  # ranks whose load each does not know
        self._undelivered: list[deque[Sleep | SleepDone]] = [
            deque() for _ in front_ends
        ]  # that had no room and must arrive
        self._disconnected: set[int] = set()  # front ends that have ended
        self._published_at = 0.0
        self._pending_sleeps: dict[tuple[int, int], set[int]] = {}  # who asked for sleep, and who has not answered
        self._forwarded: dict[int, tuple[int, int]] = {}
        self._num_forwarded = 0
        self._load_decoder = msgspec.msgpack.Decoder(CoreLoad)
        self._front_end_decoder: msgspec.msgpack.Decoder[FromFrontEnd] = msgspec.msgpack.Decoder(FromFrontEnd)

    def run_once(self, seconds: float | None = None) -> None:
        """Waits until there is something to do, and does it.

        Args:
            seconds: How long to wait at most.
        """
        timeout = None if seconds is None else seconds * 1e3
        if any(self._unpublished_ranks):
            timeout = max(0.0, self._published_at + PUBLISH_SECONDS - time.monotonic()) * 1e3
        elif any(self._undelivered):
            timeout = PUBLISH_SECONDS * 1e3
        for fd, event in self._poll.poll(timeout):
            if event & ~select.POLLIN:
                self._poll.unregister(fd)  # its other end is gone; whoever started us knows what that means
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
        for door, ranks in zip(self._front_ends, self._unpublished_ranks):
            told = sorted(ranks)[:_MAX_LOADS_PER_MESSAGE]
            if told and door.send(CoreLoads([self._loads[rank] for rank in told])):
                ranks.difference_update(told)  # the others, and who has no room now, come the next time

    def _read_front_end(self, source: int) -> None:
        while (data := self._front_ends[source].receive()) is not None:
            message = self._front_end_decoder.decode(data)
            match message:
                case SentPrefixes():
                    for index, door in enumerate(self._front_ends):
                        if index != source:
                            door.send(message)
                case Sleep():
                    self._forward_sleep(source, message)
                case SleepDone():
                    self._record_sleep_done(source, message.id)

    def _forward_sleep(self, source: int, message: Sleep) -> None:
        self._num_forwarded += 1
        number = self._num_forwarded
        asker = (source, message.id)
        self._forwarded[number] = asker
        others = set(range(len(self._front_ends))) - self._disconnected - {source}
        self._pending_sleeps[asker] = others
        for index in others:
            self._undelivered[index].append(Sleep(number, message.is_sleeping))
        self._reply_if_complete(number)

    def _record_sleep_done(self, source: int, number: int) -> None:
        asker = self._forwarded.get(number)
        if asker is not None:
            self._pending_sleeps[asker].discard(source)
            self._reply_if_complete(number)

    def _reply_if_complete(self, number: int) -> None:
        source, id_ = asker = self._forwarded[number]
        if not self._pending_sleeps[asker]:
            del self._forwarded[number], self._pending_sleeps[asker]
            if source not in self._disconnected:
                self._undelivered[source].append(SleepDone(id_))

    def _deliver(self, index: int) -> None:
        """Sends what is due to a front end, as far as there is room."""
        due, door = self._undelivered[index], self._front_ends[index]
        while due and door.send(due[0]):
            due.popleft()

    def _remove_front_end(self, index: int) -> None:
        """Nobody waits for a front end that has ended."""
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
