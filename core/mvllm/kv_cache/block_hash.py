"""Hashes that name the contents of KV blocks.

The keys and values in a block depend on *all* tokens up to its end and on nothing else, so a chain of hashes names
them. Two blocks with the same hash hold the same values, whichever request computed them.

    root ── request keys ──> H(root, keys) ── tokens 0..15 ──> hash of block 0 ── tokens 16..31 ──> hash of block 1 ...

Where images or audio stand in the place of tokens, the hash of a block also takes in the name of their contents.

Hashes are trusted without comparing tokens, so they are SHA-256: a prompt whose blocks collide with another's cannot be
constructed. The root is random unless a seed is given, so hashes of one engine mean nothing to another.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from bisect import bisect_left
from collections.abc import Sequence

from mvllm.messages.multimodal import ItemSpan

BlockHash = bytes
"""32 bytes."""


def make_root_hash(seed: int | None = None) -> BlockHash:
    """The root of all hash chains of one engine.

    Args:
        seed: Makes the hashes reproducible; None draws a random root.
    """
    if seed is None:
        return os.urandom(32)
    return hashlib.sha256(b"mvllm block names, seed %d" % seed).digest()


def request_root_hash(root: BlockHash, keys: Sequence[tuple[str, str]]) -> BlockHash:
    """The root of one request's chain: requests with different keys share no block hash.

    Args:
        root: The engine's.
        keys: (kind, value) pairs of what, besides the tokens, decides whether blocks may be shared.
    """
    if not keys:
        return root
    digest = hashlib.sha256(b"mvllm request keys")
    digest.update(root)
    for pair in keys:
        for text in pair:
            # Length before each text: no two lists of keys have the same bytes. surrogatepass encodes any str.
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int], items: bytes = b"") -> BlockHash:
    """The hash of a full block.

    Args:
        parent: The hash of the previous block, or the request's root.
        token_ids: The tokens of this block.
        items: What `items_in_block` returns for it.
    """
    return hashlib.sha256(parent + _int64s(len(token_ids)).pack(*token_ids) + items).digest()


def items_in_block(spans: Sequence[ItemSpan], start: int, stop: int) -> bytes:
    """The names of the items whose spans overlap a block, with the block's place in each span; empty without any.

    Which rows of an item the block has follows from this and from the tokens of its chain. The last 8 bytes of each say
    how far the rows at the end of the block go on behind it without a gap: in models whose images attend in both
    directions the block's values depend on all of these.

    Args:
        spans: By rising offset.
        start, stop: First position of the block, and the first behind it.
    """
    found = b""
    for span in spans:
        if span.offset >= stop:
            break
        if span.stop > start:
            found += span.content_hash + (start - span.offset).to_bytes(8, "little", signed=True)
            found += _rows_across(span, stop).to_bytes(8, "little")
    return found


def _rows_across(span: ItemSpan, position: int) -> int:
    """How many rows of a run that begins before `position` of the prompt are at this position and behind it."""
    place, runs = position - span.offset, span.embedded
    index = bisect_left(runs, (place, 0)) - 1  # the last run that begins before it
    return max(0, runs[index][1] - place) if index >= 0 else 0


@functools.cache
def _int64s(count: int) -> struct.Struct:
    """Packs `count` integers into the same bytes on every machine."""
    return struct.Struct(f"<{count}q")
