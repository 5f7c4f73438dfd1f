"""Writer and reader processes of message queues that can be killed at a chosen instruction."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
import zlib

from mvllm.executor.message_queue import MessageReader, MessageWriter, QueueError
from mvllm.executor.message_queue.notifier import EventFdNotifier, PipeNotifier
from mvllm.executor.message_queue.ring_buffer import ShmRingBuffer

SPAWN = multiprocessing.get_context("spawn")
PAUSE = 0.002
PATTERN = random.Random(0).randbytes(16 << 10)

# Instruction boundaries at which a process is killed: (class, method, whether before or after it runs).
READER_DEATHS = {
    "before it takes the token": ("notifier", "drain", "before"),
    "after it took the token": ("notifier", "drain", "after"),
    "before it looks at the slot": (ShmRingBuffer, "label", "before"),
    "while it reads the payload": (ShmRingBuffer, "payload", "after"),
    "before it acknowledges": (ShmRingBuffer, "set_count", "before"),
    "after it acknowledged, before it tells the writer": (ShmRingBuffer, "set_count", "after"),
    "after it told the writer": ("notifier", "notify", "after"),
}
WRITER_DEATHS = {
    "before it fills the slot": (ShmRingBuffer, "fill", "before"),
    "before it labels the filled slot": (ShmRingBuffer, "publish", "before"),
    "after it labelled the slot, before it tells anyone": (ShmRingBuffer, "publish", "after"),
    "after it told the first of two readers": ("notifier", "notify", "after"),
    "after it took space": ("notifier", "drain", "after"),
}


def die_at(point, call: int) -> None:
    """Kills this process with SIGKILL before or after the `call`-th call of a method."""
    owner, method, when = point
    classes = (EventFdNotifier, PipeNotifier) if owner == "notifier" else (owner,)
    calls = 0
    for cls in classes:
        original = getattr(cls, method)

        def wrapper(*args, _original=original):
            nonlocal calls
            calls += 1
            if calls == call and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = _original(*args)
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(cls, method, wrapper)


def start(target, *args):
    process = SPAWN.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def read_until_death(handle, point, call) -> None:
    """Reads until it is killed at `point`."""
    reader = MessageReader.attach(handle, dict)
    die_at(point, call)
    while True:
        reader.dequeue()


def write_until_death(handle, point, call) -> None:
    """Writes until it is killed at `point`."""
    writer = MessageWriter.attach(handle)
    die_at(point, call)
    number = 0
    while True:
        writer.enqueue({"number": number}, [bytes(100)])
        number += 1


def idle_reader(handle, ready) -> None:
    """Attaches and never reads."""
    _reader = MessageReader.attach(handle, dict)
    ready.send(os.getpid())
    time.sleep(600)


def echo(requests, replies, message_type) -> None:
    """Sends every message back until one is None."""
    reader = MessageReader.attach(requests, message_type)
    writer = MessageWriter.attach(replies)
    while True:
        message, buffers = reader.dequeue(60)
        if message is None:
            break
        writer.enqueue(message, buffers, timeout=60)
    writer.close()
    reader.close()


def count_cpu_seconds(handle, seconds: float, result) -> None:
    """The CPU seconds of a waiting reader's thread; libraries may have busy threads of their own."""
    reader = MessageReader.attach(handle, dict)
    reader.dequeue(60)
    for limit in (0.1, seconds):  # the first timeout imports modules
        before = time.thread_time()
        with contextlib.suppress(QueueError):
            reader.dequeue(limit)
    result.send(time.thread_time() - before)


def size_of(number: int, slot_bytes: int) -> int:
    """The buffer size of message `number`: near zero, near the slot's limit, or above it."""
    draw = zlib.crc32(number.to_bytes(8, "little"))
    kind, size = draw % 100, draw // 100
    if kind < 90:
        return size % 300
    if kind < 97:
        return max(0, slot_bytes - size % 400)  # the message header and its buffer table take part of the slot
    return slot_bytes + size % (2 * slot_bytes)


def content_of(number: int, size: int) -> bytes:
    start = number % 4001
    return PATTERN[start : start + size]


def checking_reader(handle, slot_bytes: int, num_messages: int, seed: int, result) -> None:
    """Reads all messages and compares each with the expected one; pauses at random."""
    reader = MessageReader.attach(handle, list)
    draw = random.Random(seed)
    for number in range(num_messages):
        message, buffers = reader.dequeue(120)
        assert message == [number], f"message {number} was due, {message} came"
        expected = content_of(number, size_of(number, slot_bytes))
        assert bytes(buffers[0]) == expected, f"message {number} is damaged"
        if draw.random() < 0.0005:
            time.sleep(draw.random() * PAUSE)
    result.send("complete")
    reader.close()


def attach_and_wait(handles, ready) -> None:
    """Opens a writer or reader for each handle, uses the overflow socket, and waits to be killed."""
    ends = [
        MessageWriter.attach(handle) if hasattr(handle, "readers") else MessageReader.attach(handle, dict)
        for handle in handles
    ]
    for end in ends:
        end.enqueue({}, [bytes(1 << 20)]) if isinstance(end, MessageWriter) else end.dequeue(30)
    ready.send("attached")
    time.sleep(600)
