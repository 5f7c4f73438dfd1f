"""Who is at the other ends of a queue, and whether they still live.

A peer is watched through a descriptor that becomes readable when its process ends: a pidfd, or whatever the caller
passes (the read end of a pipe whose only write end the peer holds). Until a peer has a descriptor (it has not attached
yet, or the system has no pidfd) its process is looked up a few times a second while somebody waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import psutil  # type: ignore[import-untyped]

from mvllm.executor.message_queue.errors import PeerDiedError


class Peer:
    """One other end.

    Args:
        name: For people, for instance "Worker_TP3".
        index: Its number among the readers, or None for the writer.
        pid: Asks the shared memory for its process id; 0 while unknown.
        activity: Asks the shared memory what it is doing.
    """

    def __init__(self, name: str, index: int | None, pid: Callable[[], int], activity: Callable[[], str]) -> None:
        self.name = name
        self.index = index
        self._find_pid = pid
        self._find_activity = activity
        self._pid = 0
        self._fd = -1
        self._owns_fd = False
        self._observers: list[Callable[[], None]] = []
        self.is_dropped = False
        self.is_dead = False

    @property
    def pid(self) -> int | None:
        return self._pid or self._find_pid() or None

    @property
    def fd(self) -> int:
        """Readable once the peer has ended; -1 where there is no such descriptor yet."""
        return self._fd

    def watch(self, *, pid: int | None = None, fd: int | None = None) -> None:
        """Says which process this is, or gives a descriptor that becomes readable at its end (and stays the caller's).

        Saying it right after starting a child is the surest way: its number cannot have been reused.
        """
        self.forget_fd()
        self._pid = pid or self._pid
        if fd is not None:
            self._fd = fd
        elif pid is not None:
            self._open_pidfd(pid)
        self._changed()

    def observe(self, changed: Callable[[], None]) -> None:
        """Has `changed` called whenever anything about this peer has."""
        self._observers.append(changed)

    def drop(self) -> None:
        """Nobody waits for it any more, for good."""
        self.is_dropped = True
        self._changed()

    def mark_dead(self) -> None:
        """Its process has ended."""
        self.is_dead = True
        self._changed()

    def check_alive(self) -> None:
        """Finds out as much as can be known without a descriptor, and gets one where possible."""
        if self._fd >= 0 or self.is_dead or self.is_dropped:
            return
        pid = self.pid
        if pid is None:
            return
        self._open_pidfd(pid)
        if self._fd < 0 and not _is_running(pid):
            self.is_dead = True
        self._changed()

    def describe(self) -> str:
        """For example: reader 3 (Worker_TP3, pid 1234), which last said it was doing: load_model."""
        role = "the writer" if self.index is None else f"reader {self.index}"
        pid = self.pid
        activity = self._find_activity()
        doing = f", which last said it was doing: {activity}" if activity else ""
        return f"{role} ({self.name}, {f'pid {pid}' if pid else 'never attached'}){doing}"

    def died_error(self, queue: str, waiting_for: str) -> PeerDiedError:
        return PeerDiedError(
            f"Queue {queue}: {self.describe()}, has ended. It was needed for {waiting_for}.",
            name=self.name,
            index=self.index,
            pid=self.pid,
            activity=self._find_activity(),
        )

    def forget_fd(self) -> None:
        if self._owns_fd:
            os.close(self._fd)
        self._fd = -1
        self._owns_fd = False
        self._changed()

    def _changed(self) -> None:
        for changed in self._observers:
            changed()

    def _open_pidfd(self, pid: int) -> None:
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            return
        try:
            self._fd = os.pidfd_open(pid)
            self._owns_fd = True
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
