"""Queues between real processes: passed handles, many messages, and idle ends that use no CPU."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler

import msgspec
import pytest

from mvllm.executor.message_queue import MessageQueue, PeerDiedError, QueueSettings, ReaderHandle
from tests.helpers import queue_processes as processes

NUM_MESSAGES = int(
    os.environ.get("QUEUE_STRESS_MESSAGES", "20000")
)  # the full stress test has a million: about 4 minutes


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_handles_are_passed_in_the_arguments_of_a_process(method):
    requests = MessageQueue.create("requests", ["child"], settings=QueueSettings(slot_bytes=4096))
    replies = MessageQueue.create("replies", ["parent"], settings=QueueSettings(slot_bytes=4096))
    child = get_context(method).Process(
        target=processes.echo, args=(requests.reader_handle(0), replies.writer_handle(), dict | None), daemon=True
    )
    child.start()
    writer, reader = requests.open_writer(), replies.open_reader(0, dict)
    requests.close()
    replies.close()
    for size in (0, 100, 100_000):
        writer.enqueue({"size": size}, [bytes(size)], timeout=30)
        message, (buffer,) = reader.dequeue(30)
        assert (message, bytes(buffer)) == ({"size": size}, bytes(size))
    writer.enqueue(None)
    child.join(120)
    assert child.exitcode == 0
    writer.close()
    reader.close()


def test_handles_are_passed_as_plain_data_with_pass_fds():
    program = """
import sys, msgspec
from mvllm.executor.message_queue import MessageReader, ReaderHandle
handle = msgspec.json.decode(sys.argv[1], type=ReaderHandle)
reader = MessageReader.attach(handle, dict)
message, (buffer,) = reader.dequeue(30)
print(message["step"], bytes(buffer).decode())
"""
    with contextlib.closing(MessageQueue.create("steps", ["child"])) as queue:
        handle = queue.reader_handle(0)
        assert isinstance(handle, ReaderHandle)
        child = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(msgspec.to_builtins(handle))],
            pass_fds=handle.fds,
            stdout=subprocess.PIPE,
            text=True,
        )
        with contextlib.closing(queue.open_writer()) as writer:
            writer.enqueue({"step": 7}, [b"payload"])
            assert child.communicate(timeout=60)[0].split() == ["7", "payload"]


def test_a_handle_cannot_be_pickled_without_its_descriptors():
    with contextlib.closing(MessageQueue.create("steps", ["child"])) as queue:
        with pytest.raises(TypeError, match=r"ReaderHandle names open files.*pass_fds"):
            ForkingPickler.dumps(queue.reader_handle(0))


def test_the_queue_needs_neither_torch_nor_zeromq_to_be_imported():
    program = "import sys, mvllm.executor.message_queue; print({'torch', 'zmq'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "set()"


@pytest.mark.serial
def test_an_idle_reader_uses_no_cpu():
    with contextlib.closing(MessageQueue.create("steps", ["idle"])) as queue:
        result, theirs = processes.SPAWN.Pipe()
        processes.start(processes.count_cpu_seconds, queue.reader_handle(0), 2.0, theirs)
        with contextlib.closing(queue.open_writer()) as writer:
            writer.enqueue({})
            assert result.recv() < 0.02


@pytest.mark.slow
def test_eight_readers_that_pause_and_die_lose_repeat_and_reorder_nothing():
    settings = QueueSettings(num_slots=7, slot_bytes=2048)
    draw = random.Random(NUM_MESSAGES)
    names = [f"Worker_TP{index}" for index in range(8)]
    queue = MessageQueue.create("stress", names, settings=settings)
    children, results = [], []
    for index in range(8):
        result, theirs = processes.SPAWN.Pipe()
        handle = queue.reader_handle(index)
        children.append(processes.start(processes.checking_reader, handle, 2048, NUM_MESSAGES, index, theirs))
        theirs.close()
        results.append(result)
    deaths = {draw.randrange(NUM_MESSAGES // 10, NUM_MESSAGES * 9 // 10): index for index in draw.sample(range(8), 3)}
    dead = set()
    with contextlib.closing(queue.open_writer()) as writer:
        queue.close()
        for number in range(NUM_MESSAGES):
            if number in deaths:
                os.kill(children[deaths[number]].pid, signal.SIGKILL)
            size = processes.size_of(number, 2048)
            while True:
                try:
                    writer.enqueue([number], [processes.content_of(number, size)], timeout=60)
                    break
                except PeerDiedError as e:
                    assert e.index in deaths.values()
                    dead.add(e.index)
                    writer.drop_reader(e.index)
            if draw.random() < 0.0005:
                time.sleep(draw.random() * processes.PAUSE)
        for index, result in enumerate(results):
            if index not in deaths.values():
                assert result.poll(60) and result.recv() == "complete", names[index]
    assert dead == set(deaths.values())
    for child in children:
        child.join(120)
