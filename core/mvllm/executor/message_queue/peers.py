"""The processes at the other ends of a queue, and whether they are alive.

A peer is watched through a pidfd, which becomes readable when its process ends. While a peer has none (it has not
attached yet, or the system has no pidfd), waits look its process up a few times a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import psutil  # type: ignore[import-untyped]

from mvllm.executor.message_queue.errors import PeerDiedError


class Peer:
    """The process at another end.

    Args:
        name: Its name in errors, for instance "Worker_TP3".
        index: Its index among the readers, or None for the writer.
        pid: Reads its process id from the shared memory; 0 while unknown.
    """

    def __init__(self, name: str, index: int | None, pid: Callable[[], int]) -> None:
        self.name = name
        self.index = index
        self._find_pid = pid
        self._fd = -1
        self._observers: list[Callable[[], None]] = []
        self.is_dropped = False
        self.is_dead = False

    @property
    def pid(self) -> int | None:
        return self._find_pid() or None

    @property
    def fd(self) -> int:
        """Readable once the peer has ended; -1 where there is no such descriptor yet."""
        return self._fd

    def observe(self, changed: Callable[[], None]) -> None:
        """Registers `changed`, which is called whenever this peer changes."""
        self._observers.append(changed)

    def drop(self) -> None:
        """Excludes it from all further waits."""
        self.is_dropped = True
        self._notify_observers()

    def mark_dead(self) -> None:
        """Records that its process has ended."""
        self.is_dead = True
        self._notify_observers()

    def check_alive(self) -> None:
        """Opens a pidfd if the peer has no descriptor; where that is impossible, looks the process up."""
        if self._fd >= 0 or self.is_dead or self.is_dropped:
            return
        pid = self.pid
        if pid is None:
            return
        self._open_pidfd(pid)
        if self._fd < 0 and not _is_running(pid):
            self.is_dead = True
        self._notify_observers()

    def describe(self) -> str:
        """For example: reader 3 (Worker_TP3, pid 1234)."""
        role = "the writer" if self.index is None else f"reader {self.index}"
        pid = self.pid
        return f"{role} ({self.name}, {f'pid {pid}' if pid else 'never attached'})"

    def died_error(self, queue: str, waiting_for: str) -> PeerDiedError:
        return PeerDiedError(
            f"Queue {queue}: {self.describe()} has ended. It was needed for {waiting_for}.",
            name=self.name,
            index=self.index,
            pid=self.pid,
        )

    def forget_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._notify_observers()

    def _notify_observers(self) -> None:
        for changed in self._observers:
            changed()

    def _open_pidfd(self, pid: int) -> None:
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            return
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.is_dead = True
        except OSError:  # an old kernel, or a sandbox: the process is looked up instead
            return


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def describe_all(peers: Sequence[Peer]) -> str:
    return "; ".join(peer.describe() for peer in peers)
