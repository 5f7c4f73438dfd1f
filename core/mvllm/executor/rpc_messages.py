"""The messages between the executor and its workers. Typed msgpack; nothing is pickled.

    executor ── RPCRequest(id, method, args, ranks, reply_from) ──> every worker    (rpc_broadcast_mq)
    worker   ── Reply(id, rank, result | failure) ─────────────> executor        (its worker_response_mq)

A worker that leaves a step's tokens on the device defers the reply until the next step has been launched or another
request arrives. An executor that waits for the newest step and has no other request sends FLUSH_ID.

A reply carries the id of its request. A reply whose call is no longer pending (it timed out, or the error of another
rank ended it) is dropped, and is never taken for the reply to a later call.
"""

from __future__ import annotations

import functools
import typing
from dataclasses import dataclass
from typing import Any

import msgspec

from mvllm.errors import ConfigError
from mvllm.messages.process_failure import ProcessFailure
from mvllm.platform.worker_protocol import WorkerProtocol

STOP_ID = 0
"""The id of the stop request, which ends a worker's loop. No call has it."""

FLUSH_ID = -1
"""The id of the flush request, which asks for deferred replies. No call has it, and it has no reply."""


class RPCRequest(msgspec.Struct, array_like=True, frozen=True):
    """One call.

    Attributes:
        id: Counts from 1; or STOP_ID, or FLUSH_ID.
        method: A method of WorkerProtocol.
        args: Its arguments, as an array.
        ranks: The ranks that execute it, or None for all.
        reply_from: The only rank that sends its result, or None for all that execute. Failures are always sent.
        mask_indices: The token masks among the arguments are different from each other: the mask of the i-th row is the
            `mask_indices[i]`-th. None if there is a mask for each row.
    """

    id: int
    method: str
    args: bytes
    ranks: tuple[int, ...] | None = None
    reply_from: int | None = None
    mask_indices: list[int] | None = None

    def is_addressed_to(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The result of a request on one rank, as msgpack; empty where `failure` is set."""

    id: int
    rank: int
    result: bytes
    failure: ProcessFailure | None = None


_MANY_MASK_BYTES = 1 << 16
"""Masks of fewer bytes are sent as they are."""


def remove_equal_masks(num_rows: int, masks: bytes) -> tuple[bytes, list[int]] | None:
    """The different masks among those of `num_rows` rows, and the index of each row's; None if that saves little.

    Sequences with the same grammar mostly are in one of a few states. With a vocabulary of 262,144 tokens the masks of
    256 rows have 8 MiB, more than a slot of the message queue.
    """
    if len(masks) < _MANY_MASK_BYTES:
        return None
    size = len(masks) // num_rows
    found: dict[bytes, int] = {}
    indices = [found.setdefault(masks[i : i + size], len(found)) for i in range(0, len(masks), size)]
    return (b"".join(found), indices) if 2 * len(found) <= num_rows else None


def restore_equal_masks(masks: bytes, indices: list[int]) -> bytes:
    """The masks of all rows, from what `remove_equal_masks` returned."""
    size = len(masks) // (max(indices) + 1)
    different = [masks[i : i + size] for i in range(0, len(masks), size)]
    return b"".join([different[i] for i in indices])


@dataclass(frozen=True)
class MethodCodec:
    """Decoders for the arguments and the result of one WorkerProtocol method, from its annotations."""

    name: str
    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Any]


@functools.cache
def method_codecs() -> dict[str, MethodCodec]:
    """The codecs of all methods that a worker offers, by name."""
    codecs = {}
    for name, function in vars(WorkerProtocol).items():
        if name.startswith("_") or not callable(function):
            continue
        hints = typing.get_type_hints(function)
        result = hints.pop("return", None)
        arguments: Any = tuple.__class_getitem__(tuple(hints.values()))
        codecs[name] = MethodCodec(name, msgspec.msgpack.Decoder(arguments), msgspec.msgpack.Decoder(result))
    # WorkerWrapper answers this one: it depends on the worker's class.
    codecs["can_sample_later"] = MethodCodec(
        "can_sample_later", msgspec.msgpack.Decoder(tuple[()]), msgspec.msgpack.Decoder(bool)
    )
    return codecs


def codec_of(method: str) -> MethodCodec:
    """The codec of a declared method.

    Raises:
        ConfigError: WorkerProtocol has no such method.
    """
    codec = method_codecs().get(method)
    if codec is None:
        raise ConfigError(f"collective_rpc({method!r}): workers offer {', '.join(sorted(method_codecs()))}.")
    return codec
