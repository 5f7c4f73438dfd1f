"""Handles of message-queue ends: serializable data with which another process opens a reader or writer.

A handle for the same machine names file descriptors, which must be passed along with it:

    subprocess.Popen(..., pass_fds=handle.fds)      and the handle as msgpack, for instance through a pipe
    multiprocessing.Process(..., args=(handle,))    with any start method; multiprocessing passes the descriptors

A handle for another machine contains host, port and CURVE keys. Send it over a confidential channel.
"""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.reduction
import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

FdPair: TypeAlias = tuple[int, int]  # a notifier's read and write descriptor, which may be the same


class _LocalHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of handles for the same machine.

    Attributes:
        queue: The queue's name.
        segment: File descriptor of the shared memory of the ring buffer.
        token: The prefix of every message on the overflow socket.
        spin_seconds: See QueueSettings.
    """

    queue: str
    segment: int
    token: bytes
    spin_seconds: float

    @property
    @abstractmethod
    def fds(self) -> tuple[int, ...]:
        """All descriptors that the handle names, without duplicates."""

    @abstractmethod
    def with_fds(self, new: Mapping[int, int]) -> Any:
        """The same handle with each descriptor `fd` replaced by `new[fd]`."""

    def duplicated(self) -> Any:
        """The same handle with duplicated descriptors, for an end in this process."""
        return self.with_fds({fd: os.dup(fd) for fd in self.fds})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the handle while multiprocessing starts a child; raises TypeError otherwise."""
        if multiprocessing.context.get_spawning_popen() is None:
            raise TypeError(
                f"A {type(self).__name__} names open files, so it can only be sent to a child that is being started: "
                "in the args of a multiprocessing.Process, or as msgpack with subprocess's pass_fds."
            )
        passed = {fd: multiprocessing.reduction.DupFd(fd) for fd in self.fds}
        return _rebuild, (type(self), msgspec.msgpack.encode(self), passed)


class WriterHandle(_LocalHandle, frozen=True, kw_only=True):
    """Handle of the writing end.

    Attributes:
        items, space: For each reader, the notifiers "items available" and "space available".
        readers: The name of each reader.
        overflow: The address of the overflow socket of each reader.
    """

    items: tuple[FdPair, ...]
    space: tuple[FdPair, ...]
    readers: tuple[str, ...]
    overflow: tuple[str, ...]

    @property
    def fds(self) -> tuple[int, ...]:
        return _unique(self.segment, *(fd for pair in (*self.items, *self.space) for fd in pair))

    def with_fds(self, new: Mapping[int, int]) -> WriterHandle:
        return msgspec.structs.replace(
            self,
            segment=new[self.segment],
            items=tuple(_replace_fds(pair, new) for pair in self.items),
            space=tuple(_replace_fds(pair, new) for pair in self.space),
        )


class ReaderHandle(_LocalHandle, frozen=True, kw_only=True):
    """Handle of one reading end.

    Attributes:
        index: The index of the reader.
        items, space: The notifiers "items available" and "space available".
        writer: The writer's name.
        overflow: The address of its overflow socket.
    """

    index: int
    items: FdPair
    space: FdPair
    writer: str
    overflow: str

    @property
    def fds(self) -> tuple[int, ...]:
        return _unique(self.segment, *self.items, *self.space)

    def with_fds(self, new: Mapping[int, int]) -> ReaderHandle:
        return msgspec.structs.replace(
            self, segment=new[self.segment], items=_replace_fds(self.items, new), space=_replace_fds(self.space, new)
        )


class RemoteReaderHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Handle of one reading end on another machine. Confidential: it grants access to the queue.

    Attributes:
        queue: The queue's name.
        index: The index among the remote readers.
        host, port: The address at which the writer listens.
        writer: The writer's name.
        server_key: The writer's public CURVE key.
        public_key, secret_key: The CURVE key pair of the queue's remote readers.
    """

    queue: str
    index: int
    host: str
    port: int
    writer: str
    server_key: bytes
    public_key: bytes
    secret_key: bytes


def _rebuild(cls: type[_LocalHandle], encoded: bytes, passed: Mapping[int, Any]) -> Any:
    return msgspec.msgpack.decode(encoded, type=cls).with_fds({fd: dup.detach() for fd, dup in passed.items()})


def _replace_fds(pair: FdPair, new: Mapping[int, int]) -> FdPair:
    return (new[pair[0]], new[pair[1]])


def _unique(*fds: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(fds))
