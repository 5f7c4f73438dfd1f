"""Peers killed at the relevant instruction boundaries: the other end detects it, names the peer, and continues."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from mvllm.executor.message_queue import MessageQueue, PeerDiedError, QueueSettings, ReaderGroup
from tests.helpers import queue_processes as processes
from tests.helpers.processes import assert_no_new_shared_memory, shared_memory_names

SMALL = QueueSettings(num_slots=3, slot_bytes=1024)
SOON = 15.0  # seconds; detection takes milliseconds, running again on a busy machine longer; the limits are twice this


@contextlib.contextmanager
def queue_of(*readers, settings=SMALL):
    queue = MessageQueue.create("rpc_broadcast", readers, writer="EngineCore", settings=settings)
    with contextlib.closing(queue):
        yield queue


def killed_after(process, seconds):
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    return time.monotonic()


@pytest.mark.parametrize("point", processes.READER_DEATHS.values(), ids=processes.READER_DEATHS.keys())
def test_a_reader_that_dies_anywhere_is_named_and_the_others_lose_nothing(point):
    with queue_of("Worker_TP0", "Worker_TP1") as queue:
        child = processes.start(processes.read_until_death, queue.reader_handle(1), point, 4)
        with (
            contextlib.closing(queue.open_writer()) as writer,
            contextlib.closing(queue.open_reader(0, dict)) as reader,
        ):
            sent = read = 0
            with pytest.raises(PeerDiedError, match=r"reader 1 .Worker_TP1, pid") as caught:
                for sent in range(50):
                    writer.enqueue({"number": sent}, [bytes(100)], timeout=30)
                    assert reader.dequeue(5)[0] == {"number": read}
                    read += 1
            assert (caught.value.name, caught.value.index, caught.value.pid) == ("Worker_TP1", 1, child.pid)
            assert 3 <= sent <= 15, "three slots, and the fourth call has taken at most four times three messages"
            writer.drop_reader(1)
            for number in range(20):
                writer.enqueue({"number": number}, timeout=5)
                assert reader.dequeue(5)[0] == {"number": number}
        child.join()
        assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("point", processes.WRITER_DEATHS.values(), ids=processes.WRITER_DEATHS.keys())
def test_a_writer_that_dies_anywhere_is_named_after_everything_it_sent(point):
    call = 2 if point[1] == "drain" else 5
    with queue_of("Worker_TP0", "Worker_TP1") as queue:
        readers = [queue.open_reader(i, dict) for i in range(2)]
        child = processes.start(processes.write_until_death, queue.writer_handle(), point, call)
        read = [0, 0]
        died = set()
        while len(died) < 2:
            for index, reader in enumerate(readers):
                try:
                    message, buffers = reader.dequeue(30)
                except PeerDiedError as e:
                    assert "the writer (EngineCore, pid" in str(e)
                    assert e.pid == child.pid
                    died.add(index)
                    continue
                assert message == {"number": read[index]}
                assert bytes(buffers[0]) == bytes(100)
                read[index] += 1
        assert abs(read[0] - read[1]) <= 1, "only the last message may have reached one reader and not the other"

        for reader in readers:
            reader.close()


def test_a_reader_that_sleeps_notices_at_once_that_its_writer_was_killed():
    with queue_of("Worker_TP0") as queue, contextlib.closing(queue.open_reader(0, dict)) as reader:
        ready, theirs = processes.SPAWN.Pipe()
        child = processes.start(processes.attach_and_wait, [queue.writer_handle()], theirs)
        reader.dequeue(30)
        assert ready.recv() == "attached"
        killed = killed_after(child, 0)
        with pytest.raises(PeerDiedError):
            reader.dequeue(30)
        assert time.monotonic() - killed < SOON


def test_a_writer_that_waits_for_room_notices_at_once_that_its_reader_was_killed():
    with queue_of("Worker_TP0") as queue, contextlib.closing(queue.open_writer()) as writer:
        ready, theirs = processes.SPAWN.Pipe()
        child = processes.start(processes.idle_reader, queue.reader_handle(0), theirs)
        assert ready.recv() == child.pid
        for _ in range(3):
            writer.enqueue({})
        killed = killed_after(child, 0)
        with pytest.raises(PeerDiedError, match=rf"reader 0 \(Worker_TP0, pid {child.pid}\) has ended"):
            writer.enqueue({}, timeout=30)
        assert time.monotonic() - killed < SOON


def test_the_process_is_looked_up_without_pidfd(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    with queue_of("Worker_TP0") as queue, contextlib.closing(queue.open_writer()) as writer:
        ready, theirs = processes.SPAWN.Pipe()
        child = processes.start(processes.idle_reader, queue.reader_handle(0), theirs)
        ready.recv()
        for _ in range(3):
            writer.enqueue({})
        killed = killed_after(child, 0)
        with pytest.raises(PeerDiedError, match="Worker_TP0"):
            writer.enqueue({}, timeout=30)
        assert time.monotonic() - killed < SOON


def test_a_group_notices_the_death_of_any_writer_once_it_has_read_what_is_there():
    point = processes.WRITER_DEATHS["before it fills the slot"]
    with queue_of("EngineCore") as alive, queue_of("EngineCore") as dying:
        readers = [queue.open_reader(0, dict) for queue in (alive, dying)]
        with contextlib.closing(alive.open_writer()) as writer:
            child = processes.start(processes.write_until_death, dying.writer_handle(), point, 2)
            group = ReaderGroup(readers)
            assert group.wait(30) == [readers[1]]
            child.join()
            assert group.wait(30) == [readers[1]]
            assert readers[1].dequeue(0)[0] == {"number": 0}
            with pytest.raises(PeerDiedError) as caught:
                group.wait(30)
            assert caught.value.pid == child.pid
            writer.enqueue({})
            assert group.wait(30) == [readers[0]]
        for reader in readers:
            reader.close()


class PollInTheWorstOrder:
    """A poll() that reports the data before a peer's last message, and the peer after its end."""

    def __init__(self, real, peer_fd, last_act):
        self._real, self._peer_fd, self._last_act = real, peer_fd, last_act
        self.register, self.unregister = real.register, real.unregister

    def poll(self, timeout):
        if self._last_act is None:
            return self._real.poll(timeout)
        self._last_act()
        self._last_act = None
        return [(fd, event) for fd, event in self._real.poll(timeout) if fd == self._peer_fd()]


def test_what_a_writer_sent_right_before_it_died_is_read_first():
    with queue_of("Worker_TP0") as queue, contextlib.closing(queue.open_reader(0, dict)) as reader:
        read_end, write_end = os.pipe()
        reader.source._in.peer._fd = read_end  # in place of a pidfd; the reader closes it
        writer = queue.open_writer()

        def send_and_die():
            writer.enqueue({"last": True})
            os.close(write_end)

        waiter, peer = reader.source._in.waiter, reader.source._in.peer
        waiter._poll = PollInTheWorstOrder(waiter._poll, lambda: peer.fd, send_and_die)
        assert reader.dequeue(30)[0] == {"last": True}
        with pytest.raises(PeerDiedError):
            reader.dequeue(30)
        writer.close()


def test_no_shared_memory_is_left_when_every_process_is_killed():
    before = shared_memory_names()
    with queue_of("Worker_TP0") as queue:
        ready, theirs = processes.SPAWN.Pipe()
        writer = processes.start(processes.attach_and_wait, [queue.writer_handle()], theirs)
        reader = processes.start(processes.attach_and_wait, [queue.reader_handle(0)], theirs)
        address = queue.reader_handle(0).overflow.removeprefix("ipc://")
        assert [ready.recv(), ready.recv()] == ["attached"] * 2
    for child in (writer, reader):
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert_no_new_shared_memory(before)
    with open("/proc/net/unix") as sockets:
        assert address not in sockets.read()
