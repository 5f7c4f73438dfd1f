"""The messages between a publisher of KV cache events and its subscribers.

    PUB     ── [topic] [number] [KVEventBatch] ──────────────────────> SUB       every batch
    ROUTER <── [] [number] [publisher] ─────────────────────────────── DEALER    batches from this number on, please
    ROUTER  ── [] [number] [KVEventBatch], ..., [] [END] [] ─────────>           the batches
            or [] [TOO_OLD] [] ──────────────────────────────────────>           not kept any more, or of another start
    ROUTER <── [] [SNAPSHOT] ───────────────────────────────────────── DEALER    the present index, please
    ROUTER  ── [] [number] [KVEventBatch], ..., [] [END] [] ─────────>           as of batch `number`; begins with
                                                                                 AllBlocksCleared

Numbers are 8 bytes, big-endian, from 0 in steps of 1. The first message, and requests without `publisher`, are those of
vLLM.
"""

from __future__ import annotations

END = (-1).to_bytes(8, "big", signed=True)
TOO_OLD = (-2).to_bytes(8, "big", signed=True)
SNAPSHOT = b"snapshot"

MAX_BLOCKS_PER_BATCH = 4096
"""Most blocks in one message of a snapshot."""


def number_bytes(number: int) -> bytes:
    """A sequence number as sent."""
    return number.to_bytes(8, "big")
