"""Counting wake-ups between processes: one side adds tokens, the other takes all there are.

The idea: the count lives in the kernel. A token that was added cannot be lost, however late the other side looks, and a
side that waits costs nothing. Adding and taking go through one lock inside the kernel (an eventfd's, or a pipe's), so
whatever the one process did before it added a token is visible to the process that took it: on every CPU, also on
those that reorder loads and stores. Everything the queue's correctness needs from memory ordering is in that sentence.
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
        write_fd: What tokens are added through; the same number where one descriptor does both.
    """

    read_fd: int
    write_fd: int

    @abstractmethod
    def notify(self) -> None:
        """Adds one token. Never blocks, as long as fewer than 4,096 are outstanding."""

    @abstractmethod
    def drain(self) -> int:
        """Takes all tokens; 0 when there are none. Never blocks."""

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
    """For systems without eventfd: a token is a byte."""

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
    """A count of zero, by the best means this system has."""
    if sys.platform == "linux" and HAS_EVENTFD:
        return EventFdNotifier(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return PipeNotifier(read_fd, write_fd)


def open_notifier(fds: tuple[int, int]) -> Notifier:
    """The notifier behind descriptors that came with a handle. Takes them over."""
    read_fd, write_fd = fds
    if sys.platform == "linux" and read_fd == write_fd:
        return EventFdNotifier(read_fd)
    return PipeNotifier(read_fd, write_fd)


class StopSignal:
    """Ends every wait that was given it, now and from then on. `set` may be called from any thread or signal handler.

    One signal can serve many queues. Its owner closes it, after the queues.
    """

    def __init__(self) -> None:
        self._notifier = make_notifier()
        self._is_set = False

    @property
    def fd(self) -> int:
        """Readable for good once the signal is set."""
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
