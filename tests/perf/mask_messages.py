"""Milliseconds to send the masks of 256 rows to a worker process: python tests/perf/mask_messages.py

The vocabulary has 262,144 tokens, so the masks have 8 MiB. They are sent as they are, over the overflow socket of the
message queue, and with equal masks removed, where they fit into a slot. A short reply is part of the time.
"""

from __future__ import annotations

import os
import statistics
import time

import msgspec

from mvllm.executor.message_queue import MessageQueue, QueueSettings
from mvllm.executor.rpc_messages import STOP_ID, RPCRequest, remove_equal_masks, restore_equal_masks

NUM_ROWS, MASK_BYTES, NUM_DIFFERENT, NUM_RUNS = 256, 262_144 // 8, 6, 30


def serve(requests: MessageQueue, replies: MessageQueue) -> None:
    """Reads requests as a worker does, and replies with the bytes of the masks."""
    reader, writer = requests.open_reader(0, RPCRequest), replies.open_writer()
    while (request := reader.dequeue()[0]).id != STOP_ID:
        masks = msgspec.msgpack.decode(request.args)[2]
        if request.mask_indices is not None:
            masks = restore_equal_masks(masks, request.mask_indices)
        writer.enqueue(RPCRequest(len(masks), "", b""))


def main() -> None:
    requests = MessageQueue.create("requests", ["worker"], writer="engine", settings=QueueSettings(10, 1 << 20, 100e-6))
    replies = MessageQueue.create("replies", ["engine"], writer="worker", settings=QueueSettings(10, 1 << 18, 100e-6))
    if os.fork() == 0:
        serve(requests, replies)
        os._exit(0)
    writer, reader = requests.open_writer(), replies.open_reader(0, RPCRequest)
    kinds = [os.urandom(MASK_BYTES) for _ in range(NUM_DIFFERENT)]
    masks = b"".join(kinds[row % NUM_DIFFERENT] for row in range(NUM_ROWS))
    rows = list(range(NUM_ROWS))

    def send(*, without_equal: bool) -> float:
        start = time.perf_counter()
        sent, indices = masks, None
        if without_equal and (fewer := remove_equal_masks(NUM_ROWS, masks)) is not None:
            sent, indices = fewer
        payload = msgspec.msgpack.encode((1, rows, sent))
        writer.enqueue(RPCRequest(1, "sample_tokens", payload, mask_indices=indices))
        assert reader.dequeue()[0].id == len(masks)
        return (time.perf_counter() - start) * 1e3

    for without_equal, name in ((False, "as they are"), (True, "equal ones removed")):
        times = [send(without_equal=without_equal) for _ in range(NUM_RUNS)]
        print(f"{name:20}{statistics.median(times[5:]):8.2f} ms")
    writer.enqueue(RPCRequest(STOP_ID, "", b""))


if __name__ == "__main__":
    main()
