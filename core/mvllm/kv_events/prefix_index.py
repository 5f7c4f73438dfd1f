"""Which replica has which prefix in its cache: a table from hashes of prefixes to sets of replicas.

Prompts are cut into chunks of equal length. Each chunk is named by a key: the hash of itself and of all chunks before
it. So one walk along the keys of a prompt finds the longest cached prefix of every replica:

    keys of a prompt      k1        k2        k3        k4
    replicas              A B C     A C       A         -            A has 3 chunks, C has 2, B has 1

Sets of replicas are bits of an integer: a walk costs one dictionary look-up per chunk, for any number of replicas.

Python's own hash of integers suffices as key, because a collision costs time only. It is the same in all processes of
one Python version, so that they can exchange keys.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from mvllm.messages.multimodal import ItemSpan

Replica = TypeVar("Replica", bound=Hashable)

_MIN_CHUNK_TOKENS = 64


def chunk_tokens(block_size: int) -> int:
    """Tokens per chunk between engine cores and their front ends: whole blocks, at least 64 tokens."""
    return -(-_MIN_CHUNK_TOKENS // block_size) * block_size


def sharing_keys(
    cache_salt: str | None = None,
    position_key: int = 0,
    adapter_keys: Sequence[tuple[str, str]] = (),
    items: Sequence[ItemSpan] = (),
) -> list[tuple[str, str]]:
    """The (kind, value) pairs of what, besides the tokens, decides whether requests may share blocks.

    Args:
        cache_salt: The request's.
        position_key: Of models whose rotary embedding depends on the length of the prompt; otherwise 0.
        adapter_keys: `LoRARequest.cache_keys`.
        items: Spans of images, audio and embeddings. Those without positions, to which a model has cross-attention,
            decide about every token.
    """
    keys = [] if cache_salt is None else [("cache_salt", cache_salt)]
    if position_key:
        keys.append(("position_key", str(position_key)))
    if items:
        keys.extend(("item", span.content_hash.hex()) for span in items if not span.length)
    return [*keys, *adapter_keys]


def item_id(content_hash: bytes) -> int:
    """A negative number that names the content of an image, audio or embeddings."""
    return -1 - int.from_bytes(content_hash[:7])


def ids_with_items(token_ids: Sequence[int], items: Sequence[ItemSpan], first: int = 0) -> Sequence[int]:
    """Token ids in which the first position of each item is replaced by the `item_id` of its content.

    Args:
        token_ids: Those of a prompt from position `first` on.
        items: Spans of the prompt.
    """
    ids = list(token_ids)
    for span in items:
        if span.length and first <= span.offset < first + len(ids):
            ids[span.offset - first] = item_id(span.content_hash)
    return ids


def root_key(keys: Sequence[tuple[str, str]]) -> int:
    """The key before the first chunk: prompts with different roots share no key.

    Args:
        keys: (kind, value) pairs of what, besides the tokens, decides whether blocks may be shared: a cache salt, an
            adapter. They cannot be read from the key.

    Returns:
        0 without pairs, otherwise 56 bits.
    """
    if not keys:
        return 0
    digest = hashlib.sha256(b"mvllm prefix keys")
    for pair in keys:
        for text in pair:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return int.from_bytes(digest.digest()[:7])


def prefix_keys(token_ids: Sequence[int], chunk: int, root: int = 0) -> list[int]:
    """The keys of all full chunks of a prompt.

    Args:
        token_ids: The prompt: token ids, or any other integers, such as the bytes of a text.
        chunk: Tokens per chunk.
        root: The key before the first chunk, see `root_key`; or the key of an earlier chunk, to go on from there.
    """
    ids, key, keys = tuple(token_ids), root, []
    for end in range(chunk, len(ids) + 1, chunk):
        key = hash((key, ids[end - chunk : end]))
        keys.append(key)
    return keys


class PrefixIndex(Generic[Replica]):
    """The chunks in the caches of some replicas.

    Not thread-safe. Memory: about 150 bytes per key, whatever the number of replicas that have it.
    """

    def __init__(self) -> None:
        self._replicas: list[Replica | None] = []  # by bit
        self._bits: dict[Replica, int] = {}  # 1 << position in the list
        self._holders: dict[int, int] = {}  # key -> bits of the replicas that have it

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, in the order in which they were added."""
        return list(self._bits)

    def __len__(self) -> int:
        """The number of different keys."""
        return len(self._holders)

    def add_replica(self, replica: Replica) -> None:
        """Adds a replica with an empty cache. One that is known is not changed."""
        if replica in self._bits:
            return
        if None in self._replicas:
            position = self._replicas.index(None)
            self._replicas[position] = replica
        else:
            position = len(self._replicas)
            self._replicas.append(replica)
        self._bits[replica] = 1 << position

    def remove_replica(self, replica: Replica) -> None:
        """Forgets a replica and its cache. Unknown ones are ignored."""
        if replica in self._bits:
            self.clear(replica)
            self._replicas[self._bits.pop(replica).bit_length() - 1] = None

    def store(self, replica: Replica, keys: Iterable[int]) -> None:
        """The replica has these chunks now."""
        bit, holders = self._bits[replica], self._holders
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def remove(self, replica: Replica, keys: Iterable[int]) -> None:
        """The replica has these chunks no more. Those that it did not have are ignored."""
        bit, holders = self._bits[replica], self._holders
        for key in keys:
            left = holders.get(key, 0) & ~bit
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def clear(self, replica: Replica) -> None:
        """The replica's cache is empty now."""
        self.remove(replica, self.keys(replica))

    def keys(self, replica: Replica) -> list[int]:
        """All keys that the replica has."""
        bit = self._bits[replica]
        return [key for key, holders in self._holders.items() if holders & bit]

    def has(self, replica: Replica, key: int) -> bool:
        """Whether the replica has a chunk."""
        return bool(self._holders.get(key, 0) & self._bits[replica])

    def match(self, keys: Sequence[int], other: PrefixIndex[Replica] | None = None) -> dict[Replica, int]:
        """The number of leading chunks that each replica has. Replicas that have none are left out.

        Args:
            keys: Of a prompt, from its first chunk on.
            other: A second index: a replica has a chunk if one of the two says so. The replicas of both were added and
                removed in the same order.
        """
        holders = self._holders
        others = {} if other is None else other._holders
        left = (1 << len(self._replicas)) - 1
        found: dict[Replica, int] = {}
        for count, key in enumerate(keys):
            having = holders.get(key, 0)
            if others:
                having |= others.get(key, 0)
            if lost := left & ~having:
                if count:
                    self._set_each(found, lost, count)
                left &= having
                if not left:
                    return found
        if keys:
            self._set_each(found, left, len(keys))
        return found

    def _set_each(self, found: dict[Replica, int], bits: int, count: int) -> None:
        while bits:
            lowest = bits & -bits
            replica = self._replicas[lowest.bit_length() - 1]
            if replica is not None:
                found[replica] = count
            bits ^= lowest


class RecentPrefixIndex(PrefixIndex[Replica]):
    """An estimate: each replica has the chunks of the prompts that were sent to it, the most recent ones.

    Args:
        max_chunks: Chunks kept per replica, as many as its cache holds.
    """

    def __init__(self, max_chunks: int) -> None:
        super().__init__()
        self.max_chunks = max_chunks
        self._recent: dict[Replica, OrderedDict[int, None]] = {}  # the least recently used first

    def add_replica(self, replica: Replica) -> None:
        super().add_replica(replica)
        self._recent.setdefault(replica, OrderedDict())

    def remove_replica(self, replica: Replica) -> None:
        super().remove_replica(replica)
        self._recent.pop(replica, None)

    def store(self, replica: Replica, keys: Iterable[int]) -> None:
        """Makes these chunks the most recent ones; a prompt's last chunk is forgotten before its first."""
        keys, recent = list(keys), self._recent[replica]
        super().store(replica, keys)
        for key in reversed(keys):
            recent[key] = None
            recent.move_to_end(key)
        if len(recent) > self.max_chunks:
            super().remove(replica, [recent.popitem(last=False)[0] for _ in range(len(recent) - self.max_chunks)])

    def remove(self, replica: Replica, keys: Iterable[int]) -> None:
        keys, recent = list(keys), self._recent[replica]
        super().remove(replica, keys)
        for key in keys:
            recent.pop(key, None)

    def keys(self, replica: Replica) -> list[int]:
        return list(self._recent[replica])
