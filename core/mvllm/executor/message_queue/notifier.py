"""Counting wake-ups between processes: one process adds tokens, the other takes all tokens.

The count is kept in the kernel, so a token is not lost however late the other process reads it, and a waiting process
uses no CPU. Adding and taking go through one lock inside the kernel (an eventfd's, or a pipe's), so everything that a
process stored before it added a token is visible to the process that took it: on every CPU, also on those that reorder
loads and stores. The queue needs no other memory ordering.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod

HAS_EVENTFD = hasattr(os, "eventfd")


class Notifier(ABC):
    """A count of tokens that two processes share.

    Attributes:
        read_fd: Readable, for poll(), while there are tokens.
        write_fd: The descriptor for adding tokens; equal to `read_fd` for an eventfd.
    """

    read_fd: int
    write_fd: int

    @abstractmethod
    def notify(self) -> None:
        """Adds one token. Never blocks while fewer than 4,096 tokens are outstanding."""

    @abstractmethod
    def drain(self) -> int:
        """Takes all tokens and returns their number, which may be 0. Never blocks."""

    @property
    def fds(self) -> tuple[int, int]:
        return (self.read_fd, self.write_fd)

    def close(self) -> None:
        """Idempotent."""
        for fd in {self.read_fd, self.write_fd}:
            if fd >= 0:
                os.close(fd)
        self.read_fd = self.write_fd = -1


if sys.platform == "linux":

    class EventFdNotifier(Notifier):
        def __init__(self, fd: int) -> None:
            self.read_fd = self.write_fd = fd

        def notify(self) -> None:
            os.eventfd_write(self.write_fd, 1)

        def drain(self) -> int:
            try:
                return os.eventfd_read(self.read_fd)
            except BlockingIOError:
                return 0


class PipeNotifier(Notifier):
    """A count of bytes in a pipe, for systems without eventfd."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd

    def notify(self) -> None:
        os.write(self.write_fd, b"\0")

    def drain(self) -> int:
        try:
            return len(os.read(self.read_fd, 4096))
        except BlockingIOError:
            return 0


def make_notifier() -> Notifier:
    """A notifier without tokens: an eventfd where the system has it, otherwise a pipe."""
    if sys.platform == "linux" and HAS_EVENTFD:
        return EventFdNotifier(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return PipeNotifier(read_fd, write_fd)


def open_notifier(fds: tuple[int, int]) -> Notifier:
    """The notifier of the descriptors in a handle, which it takes over."""
    read_fd, write_fd = fds
    if sys.platform == "linux" and read_fd == write_fd:
        return EventFdNotifier(read_fd)
    return PipeNotifier(read_fd, write_fd)


class StopSignal:
    """Ends all present and future waits that watch it. `set` may be called from any thread or signal handler.

    One signal can serve many queues. Its owner closes it after the queues.
    """

    def __init__(self) -> None:
        self._notifier = make_notifier()
        self._is_set = False

    @property
    def fd(self) -> int:
        """Readable from the moment the signal is set."""
        return self._notifier.read_fd

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._notifier.notify()

    def close(self) -> None:
        self._notifier.close()
