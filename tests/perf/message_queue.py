#!/usr/bin/env python3
"""Latency of messages between processes, and CPU cost of waiting.

    python tests/perf/message_queue.py [--sizes 100 10000] [--readers 1 2 4] [--messages 2000]

One process sends and 1, 2 or 4 others wait, at two paces: each message as soon as the previous one was answered, and at
an --interval after it, so that readers have gone to sleep. Per transport, size and number of readers:

    one-way    from before the send until a reader has the payload, over all readers
    round      until the sender has every reader's short answer, sent over the same transport
    writer     CPU time of the sender per message; readers: of each reader per message
    idle       CPU use of one waiting reader, as a share of one core

The transports: MessageQueue (read in place), pickle through the same ring, multiprocessing.Pipe, ZeroMQ PUB/SUB over
ipc; and the limit, an eventfd without any message. The cost of a sleep depends on the machine: on a virtual machine the
first instructions after it, with cold caches, take several times as long as the rest.
Targets, on two idle cores: one-way p50 under 20 µs for 10 kB to one reader, idle under 1 %.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import multiprocessing.reduction
import os
import pickle  # noqa: TID251  (what it is compared with)
import select
import time
import uuid

import numpy as np
import zmq

from mvllm.executor.message_queue import MessageQueue, MessageReader, MessageWriter, QueueSettings, QueueTimeoutError
from mvllm.executor.message_queue.shared_segment import SharedSegment

SPAWN = multiprocessing.get_context("spawn")
SETTINGS = QueueSettings()
IDLE_SECONDS = 2.0
ONE_WAY_TARGET_US = 20.0
IDLE_TARGET_PERCENT = 1.0


class QueueTransport:
    """Sender and receivers over message queues: one queue out, one back per reader."""

    title = "MessageQueue"

    def __init__(self, num_readers):
        names = [f"reader{i}" for i in range(num_readers)]
        self.out = MessageQueue.create("out", names, settings=SETTINGS)
        self.back = [MessageQueue.create(name, ["sender"], settings=QueueSettings(slot_bytes=4096)) for name in names]

    def for_reader(self, index):
        return (type(self), self.out.reader_handle(index), self.back[index].writer_handle())

    def open_sender(self):
        self.writer = self.out.open_writer()
        self.replies = [queue.open_reader(0, int) for queue in self.back]

    def send(self, payload):
        self.writer.enqueue(time.perf_counter_ns(), [payload], timeout=60)

    def receive_replies(self):
        for reader in self.replies:
            reader.dequeue(60)

    @classmethod
    def open_reader(cls, handle, reply_handle):
        return MessageReader.attach(handle, int), MessageWriter.attach(reply_handle)

    @staticmethod
    def receive(ends):
        sent, (payload,) = ends[0].dequeue(60)
        return sent, len(payload), time.perf_counter_ns()

    @staticmethod
    def reply(ends):
        ends[1].enqueue(0, timeout=60)

    @staticmethod
    def idle(ends, seconds):
        try:
            ends[0].dequeue(seconds)
        except QueueTimeoutError:
            return

    def close(self):
        for end in (self.writer, *self.replies, self.out, *self.back):
            end.close()


class PickleTransport(QueueTransport):
    """Like QueueTransport, but the message is a pickled object, unpickled by the receiver."""

    title = "pickle, same ring"

    def send(self, payload):
        sent = time.perf_counter_ns()
        self.writer.enqueue(0, [pickle.dumps((sent, payload), protocol=5)], timeout=60)

    @staticmethod
    def receive(ends):
        _, (packed,) = ends[0].dequeue(60)
        sent, payload = pickle.loads(packed)
        return sent, len(payload), time.perf_counter_ns()


class PipeTransport:
    title = "Pipe"

    def __init__(self, num_readers):
        self.pipes = [SPAWN.Pipe() for _ in range(num_readers)]

    def for_reader(self, index):
        return (type(self), self.pipes[index][1])

    def open_sender(self):
        self.ends = [ours for ours, _ in self.pipes]

    def send(self, payload):
        stamp = time.perf_counter_ns().to_bytes(8, "little")
        for end in self.ends:
            end.send_bytes(stamp)
            end.send_bytes(payload)

    def receive_replies(self):
        for end in self.ends:
            end.recv_bytes()

    @classmethod
    def open_reader(cls, end):
        return end

    @staticmethod
    def receive(end):
        stamp = end.recv_bytes()
        payload = end.recv_bytes()
        return int.from_bytes(stamp, "little"), len(payload), time.perf_counter_ns()

    @staticmethod
    def reply(end):
        end.send_bytes(b"0")

    @staticmethod
    def idle(end, seconds):
        end.poll(seconds)

    def close(self):
        for pair in self.pipes:
            for end in pair:
                end.close()


class PubSubTransport:
    """ZeroMQ PUB/SUB, with PUSH/PULL for the answers."""

    title = "ZMQ PUB/SUB"

    def __init__(self, num_readers):
        self.num_readers = num_readers
        self.address = f"ipc://@perf-{uuid.uuid4().hex}"
        self.context = zmq.Context()
        self.out = self.context.socket(zmq.XPUB)
        self.out.setsockopt(zmq.SNDHWM, 0)
        self.out.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.out.bind(self.address)
        self.back = self.context.socket(zmq.PULL)
        self.back.bind(self.address + "-back")

    def for_reader(self, index):
        return (type(self), self.address)

    def open_sender(self):
        for _ in range(self.num_readers):
            self.out.recv()  # their subscriptions

    def send(self, payload):
        self.out.send_multipart([time.perf_counter_ns().to_bytes(8, "little"), payload], copy=len(payload) < 65536)

    def receive_replies(self):
        for _ in range(self.num_readers):
            self.back.recv()

    @classmethod
    def open_reader(cls, address):
        context = zmq.Context()
        source = context.socket(zmq.SUB)
        source.setsockopt(zmq.RCVHWM, 0)
        source.connect(address)
        source.subscribe(b"")
        back = context.socket(zmq.PUSH)
        back.connect(address + "-back")
        return source, back

    @staticmethod
    def receive(ends):
        stamp, payload = ends[0].recv_multipart(copy=False)
        return int.from_bytes(stamp.buffer, "little"), len(payload), time.perf_counter_ns()

    @staticmethod
    def reply(ends):
        ends[1].send(b"0")

    @staticmethod
    def idle(ends, seconds):
        ends[0].poll(seconds * 1e3)

    def close(self):
        self.out.close(linger=0)
        self.back.close(linger=0)
        self.context.term()


class EventfdTransport:
    """The limit: one eventfd each way and a timestamp in shared memory. No message, no back-pressure, no dead peers."""

    title = "eventfd alone"

    def __init__(self, num_readers):
        self.num_readers = num_readers
        self.segment = SharedSegment.create(mmap.PAGESIZE, "perf")
        self.words = self.segment.view.cast("q")
        self.out = [os.eventfd(0) for _ in range(num_readers)]
        self.back = os.eventfd(0)

    def for_reader(self, index):
        return (type(self), *map(multiprocessing.reduction.DupFd, (self.segment.fd, self.out[index], self.back)))

    def open_sender(self):
        pass

    def send(self, payload):
        self.words[0] = time.perf_counter_ns()
        for fd in self.out:
            os.eventfd_write(fd, 1)

    def receive_replies(self):
        waiting = self.num_readers
        while waiting:
            waiting -= os.eventfd_read(self.back)

    @classmethod
    def open_reader(cls, *passed):
        segment, out, back = (fd.detach() for fd in passed)
        return SharedSegment(segment).view.cast("q"), out, back

    @staticmethod
    def receive(ends):
        os.eventfd_read(ends[1])
        return ends[0][0], 0, time.perf_counter_ns()

    @staticmethod
    def reply(ends):
        os.eventfd_write(ends[2], 1)

    @staticmethod
    def idle(ends, seconds):
        select.select([ends[1]], [], [], seconds)

    def close(self):
        self.words.release()
        self.segment.close()
        for fd in (*self.out, self.back):
            os.close(fd)


WAYS = (QueueTransport, PickleTransport, PipeTransport, PubSubTransport, EventfdTransport)


def run_reader(arguments, num_messages, result):
    way, *handles = arguments
    ends = way.open_reader(*handles)
    result.send("ready")
    delays = []
    before = 0.0
    for number in range(num_messages + 1):
        sent, _, received = way.receive(ends)
        way.reply(ends)
        if number == 0:
            before = time.process_time()  # after everything is loaded and connected
        else:
            delays.append(received - sent)
    busy = time.process_time() - before
    before = time.process_time()
    way.idle(ends, IDLE_SECONDS)
    result.send((delays, busy, (time.process_time() - before) / IDLE_SECONDS))
    result.recv()


def measure(way, size, num_readers, num_messages, interval):
    """(one-way µs, round-trip µs, writer CPU µs, reader CPU µs, idle share) of one combination."""
    sender = way(num_readers)
    processes, results = [], []
    for index in range(num_readers):
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=run_reader, args=(sender.for_reader(index), num_messages, theirs), daemon=True)
        process.start()
        processes.append(process)
        results.append(ours)
    sender.open_sender()
    for result in results:
        assert result.recv() == "ready"
    payload = np.random.default_rng(0).bytes(size)
    rounds = []
    busy = 0.0
    for number in range(num_messages + 1):
        if interval:
            time.sleep(interval)
        before, started = time.process_time(), time.perf_counter_ns()
        sender.send(payload)
        sender.receive_replies()
        if number:
            rounds.append(time.perf_counter_ns() - started)
            busy += time.process_time() - before
    answers = [result.recv() for result in results]
    for result in results:
        result.send("end")
    for process in processes:
        process.join()
    sender.close()
    delays = np.concatenate([answer[0] for answer in answers]) / 1e3
    reader_us = sum(answer[1] for answer in answers) / num_readers / num_messages * 1e6
    idle = max(answer[2] for answer in answers)
    return delays, np.asarray(rounds) / 1e3, busy / num_messages * 1e6, reader_us, idle


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 10_000, 1_000_000, 32_000_000])
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--interval", type=float, default=0.001, help="seconds between paced messages")
    options = parser.parse_args()
    for interval in (0.0, options.interval):
        print(f"{interval * 1e3:g} ms between messages" if interval else "one after the other")
        run_all(options, interval)


def run_all(options, interval):
    print(f"{'':18s}{'bytes':>11s} readers {'one-way p50':>12s}{'p99':>9s} {'round p50':>10s}{'p99':>9s}", end="")
    print(f" {'writer':>8s}{'reader':>9s}   idle      (µs, of CPU µs per message)")
    for size in options.sizes:
        num_messages = max(20, min(options.messages, int(2e9 / size)))
        for num_readers in options.readers:
            for way in WAYS:
                one_way, rounds, writer, reader, idle = measure(way, size, num_readers, num_messages, interval)
                p50, p99 = np.percentile(one_way, [50, 99])
                r50, r99 = np.percentile(rounds, [50, 99])
                print(f"{way.title:18s}{size:11,d}{num_readers:8d} {p50:12.1f}{p99:9.1f} {r50:10.1f}{r99:9.1f}", end="")
                print(
                    f" {writer:8.1f}{reader:9.1f} {idle:6.2%}{verdict(way, size, num_readers, p50, idle)}", flush=True
                )


def verdict(way, size, num_readers, p50, idle):
    if way is not QueueTransport or size != 10_000 or num_readers != 1:
        return ""
    met = p50 < ONE_WAY_TARGET_US and idle * 100 < IDLE_TARGET_PERCENT
    return "  target met" if met else "  TARGET MISSED"


if __name__ == "__main__":
    main()
