"""Names for the contents of KV blocks.

The idea: the keys and values in a block depend on *all* tokens up to its end and on nothing else, so a chain of hashes
names them. Two blocks with the same name hold the same values, whoever computed them.

    root ── request keys ──> H(root, keys) ── tokens 0..15 ──> name of block 0 ── tokens 16..31 ──> name of block 1 ...

Names are trusted without comparing tokens, so they are SHA-256: nobody can construct a prompt whose blocks pass for
another's. The root is random unless a seed is given: names of one engine mean nothing to another.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Sequence

BlockHash = bytes
"""32 bytes."""


def make_root_hash(seed: int | None = None) -> BlockHash:
    """Where all chains of one engine begin.

    Args:
        seed: Makes the names reproducible; None draws a random root.
    """
    if seed is None:
        return os.urandom(32)
    return hashlib.sha256(b"mvllm block names, seed %d" % seed).digest()


def request_root_hash(root: BlockHash, keys: Sequence[tuple[str, str]]) -> BlockHash:
    """Where the chain of one request begins: requests with different keys have no block name in common.

    Args:
        root: The engine's.
        keys: (kind, value) pairs of what, beside the tokens, decides whether blocks may be shared.
    """
    if not keys:
        return root
    digest = hashlib.sha256(b"mvllm request keys")
    digest.update(root)
    for pair in keys:
        for text in pair:
            # Each text behind its length: no two lists of keys have the same bytes. Any str has bytes this way.
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of a full block.

    Args:
        parent: The name of the block before it, or the request's root.
        token_ids: The tokens of this block.
    """
    return hashlib.sha256(parent + _int64s(len(token_ids)).pack(*token_ids)).digest()


@functools.cache
def _int64s(count: int) -> struct.Struct:
    """The bytes of `count` integers, the same on every machine."""
    return struct.Struct(f"<{count}q")
