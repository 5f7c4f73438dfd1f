"""Kills one side of a message queue at every instruction boundary of an operation, one kill per run.

    python -m tests.helpers.queue_boundaries reader 100

Python can call a trace function before each of its instructions. A forked process counts the instructions inside the
queue's modules during one operation, and kills itself at the n-th. The other side of the queue is in this process,
which checks the remaining state. A first process counts the boundaries. Prints one line of JSON: for each boundary, the
results of the surviving side.

    role      reader | writer: the side that is killed
    size      payload bytes of each message; more than a slot holds are sent through the socket
    --line    boundaries are those of source lines, not of instructions
    --wait    the operation has to wait for the other side in its middle
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from mvllm.executor import message_queue
from mvllm.executor.message_queue import MessageQueue, MessageReader, PeerDiedError, QueueSettings

FOLDER = os.path.dirname(message_queue.__file__)
SETTINGS = QueueSettings(num_slots=3, slot_bytes=1024, spin_seconds=0)
SPARE = 10
BEFORE_IT_WAITS = 0.01
"""Seconds after which a side that has to wait is almost certainly waiting; tests must hold in either case."""


class Boundaries:
    """Counts the boundaries inside the queue's modules, and kills the process at one.

    Args:
        kind: The trace event that counts: "opcode" or "line".
        fatal: The boundary of the kill, counting from 1; 0 for none.
    """

    def __init__(self, kind: str, fatal: int) -> None:
        self._kind, self._fatal = kind, fatal
        self.count = 0

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        if event == self._kind:
            self.count += 1
            if self.count == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)


def content(number: int, size: int) -> bytes:
    return bytes((number + i) % 251 for i in range(size))


def is_whole(message: dict[str, int], buffers: list[memoryview], number: int, size: int) -> bool:
    return message == {"number": number} and bytes(buffers[0]) == content(number, size)


def fork(body: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """Runs `body(connection)` in a child that then kills itself; returns its pid and our side of the connection."""
    mine, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            body(theirs)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    return pid, mine


def count_of(pid: int, connection: socket.socket) -> int:
    """Waits until the child exits; returns the number of boundaries that it reported, 0 if it was killed before."""
    os.waitpid(pid, 0)
    said = connection.recv(8)
    connection.close()
    return int.from_bytes(said, "little")


def kill_reader(boundaries: Boundaries, size: int, *, wait: bool) -> dict[str, int]:
    """Reader 1 of two is killed while it receives its second message.

    Returns:
        boundaries: Number of boundaries, in the run without a kill.
        sent: Messages that the writer could send before the kill was reported.
        after: Messages that it sent, and reader 0 received, after that.
    """
    queue = MessageQueue.create("q", ["survivor", "victim"], settings=SETTINGS)

    def victim(connection: socket.socket) -> None:
        reader = queue.open_reader(1, dict)
        connection.sendall(b"\0")
        reader.dequeue(10)
        connection.sendall(b"\0")
        if not wait:
            connection.recv(1)  # the second message has arrived, and its wake-up token was not consumed with the first
        with boundaries.watching():
            reader.dequeue(10)
        connection.sendall(boundaries.count.to_bytes(8, "little"))

    pid, connection = fork(victim)
    with contextlib.closing(queue.open_writer()) as writer, contextlib.closing(queue.open_reader(0, dict)) as reader:
        queue.close()
        assert connection.recv(1) == b"\0"
        found = {"boundaries": 0, "sent": 0, "after": 0}

        def send_and_read() -> None:
            number = found["sent"] + found["after"]
            writer.enqueue({"number": number}, [content(number, size)], timeout=20)
            assert is_whole(*reader.dequeue(20), number, size), f"message {number} is damaged or out of order"

        with contextlib.suppress(PeerDiedError):
            while found["sent"] < 20:
                send_and_read()
                found["sent"] += 1
                if found["sent"] == 1:
                    assert connection.recv(1) == b"\0"
                    time.sleep(BEFORE_IT_WAITS if wait else 0)
                if not wait and found["sent"] == 2:
                    connection.sendall(b"\0")
        writer.drop_reader(1)
        while found["after"] < 2 * SETTINGS.num_slots:
            send_and_read()
            found["after"] += 1
    found["boundaries"] = count_of(pid, connection)
    return found


def kill_writer(boundaries: Boundaries, size: int, *, wait: bool) -> dict[str, int]:
    """The writer is killed while it sends its second message, or, with `wait`, the first message that has no free slot.

    Returns:
        boundaries: As `kill_reader`.
        first, second: Messages that the two readers received before the kill was reported.
    """
    queue = MessageQueue.create("q", ["first", "second"], settings=SETTINGS)
    before = SETTINGS.num_slots if wait else 1

    def victim(connection: socket.socket) -> None:
        writer = queue.open_writer()
        for number in range(before):
            writer.enqueue({"number": number}, [content(number, size)], timeout=10)
        connection.sendall(b"\0")
        if not wait:
            connection.recv(1)
        with boundaries.watching():
            writer.enqueue({"number": before}, [content(before, size)], timeout=10)
        connection.sendall(boundaries.count.to_bytes(8, "little"))

    pid, connection = fork(victim)
    readers: list[MessageReader[dict[str, int]]] = [queue.open_reader(index, dict) for index in range(2)]
    queue.close()
    assert connection.recv(1) == b"\0"
    if wait:
        time.sleep(BEFORE_IT_WAITS)
    got = [0, 0]

    def read(index: int, most: int) -> None:
        while got[index] < most:
            message, buffers = readers[index].dequeue(20)
            assert is_whole(message, buffers, got[index], size), f"message {got[index]} is damaged or out of order"
            got[index] += 1

    for index in range(2):
        read(index, before)
    if not wait:
        connection.sendall(b"\0")
    for index in range(2):
        with contextlib.suppress(PeerDiedError):
            read(index, 20)
        readers[index].close()
    return {"boundaries": count_of(pid, connection), "first": got[0], "second": got[1]}


def main(role: str, size: int, *options: str) -> None:
    kind = "line" if "--line" in options else "opcode"
    kill = kill_reader if role == "reader" else kill_writer
    wait = "--wait" in options
    # With sockets and waits the number of boundaries varies between runs: SPARE more runs, some of which complete.
    total = max(kill(Boundaries(kind, 0), size, wait=wait)["boundaries"] for _ in range(3)) + SPARE
    print(json.dumps([kill(Boundaries(kind, fatal), size, wait=wait) for fatal in range(1, total + 1)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
