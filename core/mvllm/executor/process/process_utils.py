"""What a process asks of the operating system for itself: a name, a death with its parent, a stack when asked."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

import psutil  # type: ignore[import-untyped]

from mvllm.logging import configure_logging

STACK_SIGNAL = signal.SIGUSR1
"""Makes a worker write the stacks of all its threads, even from inside native code."""

_CRASH_REPORT_PREFIX = "It gave up: "
_HAS_MEMFD = hasattr(os, "memfd_create")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_STACK_BYTES = 64 << 10
_STACK_SECONDS = 0.5
_LAST_STANDARD_FD = 2


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


def write_crash_report(fd: int, error: BaseException) -> None:
    """Leaves in the stack file why this process ends by itself; its parent tells the caller."""
    head = f"{_CRASH_REPORT_PREFIX}{type(error).__qualname__}: {error}".replace("\n", " ")
    trace = "".join(traceback.format_exception(error))
    os.write(fd, f"{head}\n{trace}".encode(errors="backslashreplace"))


class StackFile:
    """Where a process writes its stacks, as somebody else reads it.

    Args:
        fd: What that process passed to `dump_stacks_to`; taken over.
    """

    SIGNAL = STACK_SIGNAL

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = 0  # bytes that `after` has returned

    def text(self) -> str:
        """What was written and not returned by `after` yet."""
        return self._read().decode(errors="replace")

    def crash_report(self) -> tuple[str, str]:
        """Why the process ended, by its own account, in one line; and its stack. Either may be empty."""
        text = self.text()
        if not text.startswith(_CRASH_REPORT_PREFIX):
            return "", text
        head, _, stack = text.removeprefix(_CRASH_REPORT_PREFIX).partition("\n")
        return head, stack

    def read_after(self, ask: Callable[[], None]) -> str:
        """What `ask`, which sends STACK_SIGNAL, makes the process write; what there is of it after half a second."""
        before = size = len(self._read())
        ask()
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = len(self._read())
            if now == size > before:
                break
            size = now
        written = self._read()
        self._seen += len(written)
        return written[before:].decode(errors="replace")

    def _read(self) -> bytes:
        return os.pread(self._fd, _STACK_BYTES, self._seen) if self._fd >= 0 else b""

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when process `pid` ends, or -1 where there is no such thing."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # an old kernel or a sandbox
            return os.pidfd_open(pid)
    return -1


def is_stopped(pid: int) -> bool:
    """Whether the kernel lets process `pid` do nothing, after SIGSTOP or in a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def set_process_name(name: str) -> None:
    """The name that ps and top show: all of it where setproctitle is installed, else 15 bytes."""
    try:
        import setproctitle  # type: ignore[import-not-found, unused-ignore]

        setproctitle.setproctitle(f"mvllm {name}")
    except ImportError:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def ensure_standard_streams() -> None:
    """Has descriptors 0, 1 and 2 lead somewhere, where whoever started this process has closed them.

    Otherwise they are the numbers of the next three files that are opened, and whatever prints prints there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD_FD:
        os.set_inheritable(fd, True)
    os.close(fd)


def limit_processor_time(seconds: float) -> None:
    """Has the kernel end this process, by SIGXCPU, when it has computed that much longer, to the second above."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def limit_memory(num_bytes: int) -> None:
    """Has the kernel refuse this process more address space than it has now and `num_bytes` beyond."""
    room = psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))


def module_search_path() -> list[str]:
    """Where this process finds modules, for a process that is started by it."""
    found = []
    for entry in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the working directory has been removed: nothing is found there
            if isinstance(entry, str):  # what is no string, Python ignores too
                found.append(entry or os.getcwd())
    return found


def configure_child_process(
    name: str, sys_path: Sequence[str], python_path: str | None, stack_fd: int, log_level: str
) -> None:
    """Makes this interpreter like its parent: module search path, logging, and stacks where they are looked for.

    Args:
        name: What its lines on stdout and stderr begin with, for instance `Worker_TP0`.
        sys_path: Where the parent finds modules.
        python_path: The parent's own PYTHONPATH, which the launch had to replace.
        stack_fd: Where stacks go.
        log_level: Of the `mvllm` loggers.
    """
    sys.path[:] = sys_path
    if python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = python_path
    dump_stacks_to(stack_fd)
    label_output(name, log_level)


def label_output(name: str, log_level: str) -> None:
    """Has every line of this process on stdout and stderr begin with its name and process id.

    Args:
        name: For instance `Worker_TP0`.
        log_level: Of the `mvllm` loggers, which write there.
    """
    prefix = f"({name} pid={os.getpid()}) "
    sys.stdout = PrefixedStream(_open_stream(sys.stdout), prefix)
    sys.stderr = PrefixedStream(_open_stream(sys.stderr), prefix)
    configure_logging(log_level)


def exit_process(status: int) -> NoReturn:
    """Ends the process without the interpreter's and the libraries' destructors, which have been seen to hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it any more
            stream.flush()
    os._exit(status)


def _open_stream(stream: TextIO | None) -> TextIO:
    """`stream`, or one that leads nowhere: Python has none where it finds the descriptor closed."""
    return stream if stream is not None else open(os.devnull, "w")


def anonymous_file(name: str) -> int:
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


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage is collected meanwhile: imports make hundreds of thousands of objects that live for ever, and looking
    through them again and again is a sixth of their time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
