"""Events of a KV cache, as published to other programs, and the changes that front ends get. Typed msgpack.

Events have the format of vLLM's: a batch is an array [time, events, rank, publisher], an event an array that begins
with its name. Fields behind those that a reader knows are to be ignored; fields at the end may be left out.

    [1764300000.25, [["BlockStored", [hash, hash], parent, [token ids], 16, null, "device"]], 0, 4711]
"""

from __future__ import annotations

import msgspec

DEVICE, HOST, DISK = "device", "host", "disk"
"""Where a block is stored: on the device, in host blocks, or in the connector `disk`. Other connectors have names of
their own."""


class BlockStored(msgspec.Struct, tag=True, array_like=True, omit_defaults=True, frozen=True):
    """Consecutive full blocks of one sequence are cached.

    Attributes:
        block_hashes: Their hashes, 32 bytes each.
        parent_block_hash: The hash of the block before them; None if they begin the sequence.
        token_ids: Their tokens, `block_size` for each block; none if the publisher does not know them: blocks that a
            store has kept from an earlier run. Then nothing but hashes, size and medium is known.
        block_size: Tokens per block.
        lora_id: The LoRA adapter; None for none.
        medium: DEVICE, HOST, DISK, or what another connector calls its store.
        lora_name: The adapter's name.
        extra_keys: None for blocks that all requests may share. Otherwise per block a list of texts, which may be
            empty: requests share it only if theirs are equal. See `key_text`, which comes first, and `item_text`.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[str]] | None = None


class BlockRemoved(msgspec.Struct, tag=True, array_like=True, omit_defaults=True, frozen=True):
    """Blocks are no longer cached in one medium. Attributes as in BlockStored."""

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, array_like=True, omit_defaults=True, frozen=True):
    """No block is cached, in any medium."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The events of one step, in their order.

    Attributes:
        ts: When they happened, in seconds since 1970.
        events: The events.
        data_parallel_rank: The replica's rank.
        publisher: A number drawn at the publisher's start. Sequence numbers of different publishers are unrelated.
    """

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None
    publisher: int = 0


class CacheChanges(msgspec.Struct, array_like=True, omit_defaults=True):
    """How the prefix cache of a replica has changed, for the front ends' load balancers.

    Chunks are named by `prefix_keys`. A chunk counts as stored when its last block is.

    Attributes:
        cleared: The cache was cleared first.
        stored, removed: Keys of chunks, each in one of the two at most.
    """

    cleared: bool = False
    stored: list[int] = []
    removed: list[int] = []


def merge_changes(first: CacheChanges | None, then: CacheChanges | None) -> CacheChanges | None:
    """Both changes, one after the other, as one."""
    if first is None or then is None or then.cleared:
        return first if then is None else then
    is_stored = dict.fromkeys(first.stored, True) | dict.fromkeys(first.removed, False)
    is_stored |= dict.fromkeys(then.stored, True) | dict.fromkeys(then.removed, False)
    return CacheChanges(
        first.cleared,
        [key for key, stored in is_stored.items() if stored],
        [] if first.cleared else [key for key, stored in is_stored.items() if not stored],
    )


def key_text(root: int) -> str:
    """The text in `extra_keys` of blocks with this root key, see `mvllm.kv_events.prefix_index.root_key`."""
    return f"mvllm:{root:014x}"


def is_key_text(text: str) -> bool:
    """Whether a text in `extra_keys` is a `key_text`."""
    return text.startswith("mvllm:")


def item_text(content_hash: bytes, place: int) -> str:
    """The text in `extra_keys` of an image, audio or embeddings among the tokens of a block.

    Args:
        content_hash: Its name.
        place: Where its span begins, counted from the block's first position; negative in later blocks of the span.
    """
    return f"{content_hash.hex()}:{place}"


def item_of_text(text: str) -> tuple[bytes, int]:
    """The arguments of an `item_text`.

    Raises:
        ValueError: It is none.
    """
    name, _, place = text.partition(":")
    return bytes.fromhex(name), int(place)


def root_of_text(text: str) -> int:
    """The root key of a `key_text`.

    Raises:
        ValueError: It is none.
    """
    prefix, _, digits = text.partition(":")
    if prefix != "mvllm":
        raise ValueError(f"{text!r:.40} is no key of mvllm.")
    return int(digits, 16)
