"""Readers on other machines (here over this machine's TCP): the same guarantees, and authentication."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import msgspec
import pytest
import zmq

from mvllm.errors import ConfigError
from mvllm.executor.message_queue import (
    MessageQueue,
    MessageReader,
    PeerDiedError,
    QueueSettings,
    QueueStoppedError,
    QueueTimeoutError,
    ReaderGroup,
    RemoteReaderHandle,
    StopSignal,
)
from tests.helpers import queue_processes as processes

SMALL = QueueSettings(num_slots=3, slot_bytes=1024)


class Ends:
    """A queue with one local and some remote readers, all in this process."""

    def __init__(self, num_remote=1):
        remote = [f"Worker_TP{1 + i}" for i in range(num_remote)]
        self.queue = MessageQueue.create(
            "rpc_broadcast", ["Worker_TP0"], remote_readers=remote, host="127.0.0.1", settings=SMALL
        )
        self.handles = [self.queue.remote_reader_handle(i) for i in range(num_remote)]
        self.writer = self.queue.open_writer()
        self.local = self.queue.open_reader(0, dict)
        self.remote = []

    def connect(self, index=0, **changes):
        data = msgspec.msgpack.encode(msgspec.structs.replace(self.handles[index], **changes))
        handle = msgspec.msgpack.decode(data, type=RemoteReaderHandle)  # plain data, as across machines
        self.remote.append(MessageReader.attach(handle, dict))
        return self.remote[-1]

    def close(self):
        for end in (*self.remote, self.local, self.writer, self.queue):
            end.close()


@pytest.fixture
def ends():
    with contextlib.closing(Ends()) as ends:
        yield ends


def test_local_and_remote_readers_get_the_same_messages_in_order(ends):
    remote = ends.connect()
    for number in range(20):
        payload = bytes([number]) * (number * 300)
        ends.writer.enqueue({"number": number}, [payload], timeout=10)
        for reader in (ends.local, remote):
            message, (buffer,) = reader.dequeue(10)
            assert (message, bytes(buffer)) == ({"number": number}, payload)


def test_back_pressure_applies_to_remote_readers(ends):
    remote = ends.connect()
    for number in range(10):
        if number < 3:
            ends.writer.enqueue({"number": number}, timeout=10)
            ends.local.dequeue(10)
    with pytest.raises(QueueTimeoutError, match=r"remote reader 0 \(Worker_TP1, pid \d+\).*At most 3"):
        ends.writer.enqueue({}, timeout=0.3)
    assert remote.dequeue(10)[0] == {"number": 0}
    ends.writer.enqueue({"number": 3}, timeout=10)
    assert [remote.dequeue(10)[0]["number"] for _ in range(3)] == [1, 2, 3]


def test_a_message_waits_for_a_remote_reader_that_has_not_connected_yet(ends):
    with pytest.raises(QueueTimeoutError, match="Worker_TP1, never attached"):
        ends.writer.enqueue({}, timeout=0.05)
    timer = threading.Timer(0.1, ends.connect)
    timer.start()
    ends.writer.enqueue({"number": 0}, timeout=10)
    timer.join()
    assert ends.remote[0].dequeue(10)[0] == {"number": 0}


def test_a_group_can_wait_for_remote_readers(ends):
    remote = ends.connect()
    group = ReaderGroup([remote])
    threading.Timer(0.1, ends.writer.enqueue, [{"number": 0}]).start()
    assert group.wait(10) == [remote]


def test_a_reader_with_another_key_is_refused_and_others_are_served(ends):
    public, secret = zmq.curve_keypair()
    other_reader = ends.connect(public_key=public, secret_key=secret)
    with pytest.raises(PeerDiedError, match="refused our key"):
        other_reader.dequeue(10)
    with pytest.raises(QueueTimeoutError, match="never attached"):
        ends.writer.enqueue({}, timeout=0.05)
    remote = ends.connect()
    ends.writer.enqueue({"number": 0}, timeout=10)
    assert remote.dequeue(10)[0] == {"number": 0}


def test_plain_bytes_and_unencrypted_peers_never_reach_the_queue(ends):
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.setsockopt(zmq.ROUTING_ID, b"r\0\0\0\0")
        plain.connect(f"tcp://127.0.0.1:{ends.handles[0].port}")
        plain.send(bytes(16))
        with socket.create_connection(("127.0.0.1", ends.handles[0].port)) as raw:
            raw.sendall(os.urandom(4096))
            with pytest.raises(QueueTimeoutError, match="never attached"):
                ends.writer.enqueue({}, timeout=0.3)


def test_the_writer_notices_a_killed_remote_reader_and_goes_on_without_it(ends):
    ready, theirs = processes.SPAWN.Pipe()
    child = processes.start(processes.idle_reader, ends.handles[0], theirs)
    ready.recv()
    for _ in range(3):
        ends.writer.enqueue({}, timeout=30)
        ends.local.dequeue(10)
    os.kill(child.pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(PeerDiedError, match=rf"Worker_TP1, pid {child.pid}.*has ended"):
        ends.writer.enqueue({}, timeout=30)
    assert time.monotonic() - killed < 20  # of the 30 after which it would give up
    ends.writer.drop_reader(0, remote=True)
    ends.writer.enqueue({"number": 3}, timeout=10)
    assert ends.local.dequeue(10)[0] == {"number": 3}


def test_a_remote_reader_notices_that_its_writer_is_gone_after_the_last_message(ends):
    remote = ends.connect()
    ends.writer.enqueue({"number": 0}, timeout=10)
    ends.writer.close()
    assert remote.dequeue(10)[0] == {"number": 0}
    with pytest.raises(PeerDiedError, match=r"the writer \(writer, at 127.0.0.1 port \d+\) closed the connection"):
        remote.dequeue(30)


def test_a_remote_wait_ends_at_the_stop_signal(ends):
    stop = StopSignal()
    reader = MessageReader.attach(ends.handles[0], dict, stop)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(QueueStoppedError):
        reader.dequeue(30)
    reader.close()


def test_errors_of_remote_queues_name_the_remedy(ends):
    with pytest.raises(ConfigError, match="open_writer"):
        MessageQueue.create("q", [], remote_readers=["r"], host="127.0.0.1").writer_handle()
    with pytest.raises(ConfigError, match="remote_readers and host go together"):
        MessageQueue.create("q", [], remote_readers=["r"])
    with pytest.raises(ConfigError, match=r"listen at '203.0.113.7'.*address of this machine"):
        MessageQueue.create("q", [], remote_readers=["r"], host="203.0.113.7")
