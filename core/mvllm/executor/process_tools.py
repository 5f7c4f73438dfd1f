"""What a process asks of the operating system for itself: a name, a death with its parent, a stack when asked."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from typing import Any, TextIO

STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of all its threads, even from inside native code."""

_HAS_MEMFD = hasattr(os, "memfd_create")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, in whatever state this process is.

    Linux only; elsewhere `watch_parent` has to do. Ends the process at once if the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call
        os._exit(1)


def watch_parent(pipe: socket.socket) -> None:
    """Ends this process when the other end of `pipe` is closed, by its owner or by its owner's death.

    The end is immediate: nobody is left who would want results, and a cleaner way may be what the parent gave up on.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(pipe.fileno(), select.POLLIN | select.POLLHUP)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def dump_stacks_to(fd: int) -> None:
    """Writes all threads' stacks to `fd` when the process crashes or gets STACK_SIGNAL. No lock is needed for it."""
    faulthandler.enable(file=fd, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def set_process_name(name: str) -> None:
    """The name that ps and top show: all of it where setproctitle is installed, else 15 bytes."""
    try:
        import setproctitle  # type: ignore[import-not-found, unused-ignore]

        setproctitle.setproctitle(f"mvllm {name}")
    except ImportError:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def unnamed_file(name: str) -> int:
    """A descriptor of an empty file that only its descriptors lead to: it is gone with the last of them.

    Args:
        name: For people who read /proc.
    """
    if _HAS_MEMFD:
        with contextlib.suppress(OSError):  # a sandbox may forbid the call
            return os.memfd_create(f"mvllm-{name}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


class PrefixedStream:
    """A text stream whose lines begin with the name of the process that writes them.

    Args:
        stream: Where lines go.
        prefix: What they begin with.
    """

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._at_line_start = True

    def write(self, text: str) -> int:
        if text:
            body = text[:-1].replace("\n", f"\n{self._prefix}") + text[-1]
            self._stream.write(self._prefix + body if self._at_line_start else body)
            self._at_line_start = text.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
