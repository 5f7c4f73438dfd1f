"""Messages between the two ends of a connection, and limits of their fields.

    consumer                   producer
    Hello            ──>
                     <──       Welcome, or Refused
                     <──       AgentMetadata                                            (nixl)
    Lookup           ──>
                     <──       Found
    Fetch            ──>
                     <──       Blocks, then a frame with the bytes of each block        (tcp)
                     <──       Leased                                                   (shared_memory, nixl)
    Copied           ──>                                                                (shared_memory, nixl)
                     <──       Found: the blocks that were not discarded meanwhile
    Release          ──>       no answer

The first message is Hello, after the ends have authenticated each other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 16 << 20
"""Longest message; blocks are frames of their own."""
MAX_FETCHED_BLOCKS = 64
"""Most blocks of one Fetch."""

_Key = Annotated[bytes, msgspec.Meta(max_length=128)]
_Id = Annotated[str, msgspec.Meta(max_length=1024)]


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The consumer's first message.

    Attributes:
        version: The protocol's.
        namespace: Of the consumer's engine, see `KVConnectorContext`.
        block_bytes, state_bytes: Bytes of one block, and of one state; 0 without states.
        parts: What the namespace is made of, for messages only.
    """

    version: int
    namespace: Annotated[bytes, msgspec.Meta(max_length=64)]
    block_bytes: int
    state_bytes: int
    parts: Annotated[dict[str, str], msgspec.Meta(max_length=64)]


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The producer's blocks fit. `num_blocks` and `num_states` are those of its host memory."""

    num_blocks: int
    num_states: int


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The producer's blocks do not fit the consumer's, for this reason."""

    reason: Annotated[str, msgspec.Meta(max_length=2048)]


class Lookup(msgspec.Struct, tag="lookup", array_like=True):
    """Which keys are there? The producer waits up to `seconds` for those that it expects."""

    request_id: _Id
    keys: Annotated[list[_Key], msgspec.Meta(max_length=1 << 17)]
    seconds: float


class Found(msgspec.Struct, tag="found", array_like=True):
    """By position in the request: whether the block is there."""

    found: list[bool]


class Fetch(msgspec.Struct, tag="fetch", array_like=True):
    """Asks for blocks. With `are_states` by position: whether it is a sequence state."""

    request_id: _Id
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_FETCHED_BLOCKS)]
    are_states: Annotated[list[bool], msgspec.Meta(max_length=MAX_FETCHED_BLOCKS)]


class Blocks(msgspec.Struct, tag="blocks", array_like=True):
    """By position in Fetch: whether the block is there, and its bytes follow in a frame."""

    found: list[bool]


class Leased(msgspec.Struct, tag="leased", array_like=True):
    """By position in Fetch: the index of the host block, held until the consumer says Copied; -1 if it is not there."""

    indices: list[int]


class Copied(msgspec.Struct, tag="copied", array_like=True):
    """The consumer has copied the blocks of the last Leased."""


class AgentMetadata(msgspec.Struct, tag="agent", array_like=True):
    """How the producer's memory is read by NIXL.

    Attributes:
        metadata: The agent's own description.
        addresses: Where the first host block is in the producer's memory, and the first host block of states.
    """

    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    addresses: Annotated[list[int], msgspec.Meta(max_length=2)]


class Release(msgspec.Struct, tag="release", array_like=True):
    """The consumer needs no further block of a request."""

    request_id: _Id


Message = Hello | Welcome | Refused | Lookup | Found | Fetch | Blocks | Leased | Copied | Release | AgentMetadata

_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes) -> Message:
    """A received message.

    Raises:
        msgspec.DecodeError: It is not a message; ValidationError is a subclass.
    """
    return _decoder.decode(data)
