"""Operating-system settings of a process: name, death with its parent, stack dumps, limits, output prefixes."""

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
"""Makes a process write the stacks of all its threads, even inside native code."""

_CRASH_REPORT_PREFIX = "It ended with an error: "
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_STACK_BYTES = 64 << 10
_STACK_SECONDS = 0.5
_LAST_STANDARD_FD = 2
_GC_THRESHOLD = 10_000


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when the thread that started it ends.

    Linux only; elsewhere `watch_parent` replaces it. Ends the process at once if the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call
        os._exit(1)


def watch_parent(pipe: socket.socket) -> None:
    """Ends this process when the other end of `pipe` is closed, by its owner or by the end of its owner.

    It ends at once, without clean-up: no process needs its results, and clean-up may be what hangs.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(pipe.fileno(), select.POLLIN | select.POLLHUP)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def dump_stacks_to(fd: int) -> None:
    """Writes the stacks of all threads to `fd` when the process crashes or receives STACK_SIGNAL, without a lock."""
    faulthandler.enable(file=fd, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def write_crash_report(fd: int, error: BaseException) -> None:
    """Writes to the stack file why this process ends by itself, for the parent's error message."""
    head = f"{_CRASH_REPORT_PREFIX}{type(error).__qualname__}: {error}".replace("\n", " ")
    trace = "".join(traceback.format_exception(error))
    os.write(fd, f"{head}\n{trace}".encode(errors="backslashreplace"))


class StackFile:
    """Reads the file that another process writes its stacks to.

    Args:
        fd: The descriptor that the process passed to `dump_stacks_to`; taken over. -1 for none.
    """

    SIGNAL = STACK_SIGNAL

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = 0  # bytes that `read_after` has returned

    def text(self) -> str:
        """What was written and not returned by `read_after` yet."""
        return self._read().decode(errors="replace")

    def crash_report(self) -> tuple[str, str]:
        """The reason that the process wrote before it ended, in one line, and its stack. Either may be empty."""
        text = self.text()
        if not text.startswith(_CRASH_REPORT_PREFIX):
            return "", text
        head, _, stack = text.removeprefix(_CRASH_REPORT_PREFIX).partition("\n")
        return head, stack

    def read_after(self, request: Callable[[], None]) -> str:
        """What the process writes within half a second of `request`, which sends STACK_SIGNAL."""
        before = size = len(self._read())
        request()
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
    """A descriptor that becomes readable when process `pid` ends, or -1 where the system offers none."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # an old kernel or a sandbox
            return os.pidfd_open(pid)
    return -1


def is_stopped(pid: int) -> bool:
    """Whether process `pid` is stopped, by SIGSTOP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def set_process_name(name: str) -> None:
    """Sets the name that ps and top show: in full where setproctitle is installed, otherwise its first 15 bytes."""
    try:
        import setproctitle  # type: ignore[import-not-found, unused-ignore]

        setproctitle.setproctitle(f"mvllm {name}")
    except ImportError:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def ensure_standard_streams() -> None:
    """Opens descriptors 0, 1 and 2 on /dev/null where they are closed.

    Otherwise the next files that are opened would get these numbers, and output would go into them.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD_FD:
        os.set_inheritable(fd, True)
    os.close(fd)


def limit_processor_time(seconds: float) -> None:
    """Has the kernel end this process by SIGXCPU after `seconds` more of CPU time, rounded up to a second."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def limit_memory(num_bytes: int) -> None:
    """Limits the address space of this process to its present size plus `num_bytes`."""
    limit = psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def module_search_path() -> list[str]:
    """The module search path of this process, for a process that it starts."""
    found = []
    for entry in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the working directory has been removed
            if isinstance(entry, str):  # Python ignores other entries too
                found.append(entry or os.getcwd())
    return found


def configure_child_process(
    name: str, sys_path: Sequence[str], python_path: str | None, stack_fd: int, log_level: str
) -> None:
    """Sets up this process like its parent: module search path, logging, and the file for stacks.

    Args:
        name: The prefix of its lines on stdout and stderr, for instance `Worker_TP0`.
        sys_path: The parent's module search path.
        python_path: The parent's PYTHONPATH, which the launch has replaced.
        stack_fd: Descriptor of the file for stacks.
        log_level: The level of the `mvllm` loggers.
    """
    sys.path[:] = sys_path
    if python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = python_path
    dump_stacks_to(stack_fd)
    label_output(name, log_level)


def label_output(name: str, log_level: str) -> None:
    """Prefixes every line of this process on stdout and stderr with its name and process id.

    Args:
        name: For instance `Worker_TP0`.
        log_level: The level of the `mvllm` loggers, which write to these streams.
    """
    prefix = f"({name} pid={os.getpid()}) "
    sys.stdout = PrefixedStream(_open_stream(sys.stdout), prefix)
    sys.stderr = PrefixedStream(_open_stream(sys.stderr), prefix)
    configure_logging(log_level)


def exit_process(status: int) -> NoReturn:
    """Ends the process without the interpreter's and the libraries' destructors, which may hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no stream, or it has no reader
            stream.flush()
    os._exit(status)


def _open_stream(stream: TextIO | None) -> TextIO:
    """`stream`, or one to /dev/null where Python has none because the descriptor is closed."""
    return stream if stream is not None else open(os.devnull, "w")


def anonymous_file(name: str, directory: str | None = None) -> int:
    """A descriptor of an empty file without a name, which is deleted when its last descriptor is closed.

    Args:
        name: Shown in /proc.
        directory: The file system to create it in; None for anonymous memory, or a temporary file without it.
    """
    fd = memory_file(name) if directory is None else -1
    if fd >= 0:
        return fd
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:  # has no name, or only until it is open
        return os.dup(file.fileno())


def memory_file(name: str) -> int:
    """A descriptor of an empty file in anonymous memory, which can be sealed; -1 where the system offers none."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid the call
            return os.memfd_create(f"mvllm-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return -1


class PrefixedStream:
    """A text stream that prefixes every line.

    Args:
        stream: The stream to write to.
        prefix: The prefix of each line.
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
    """Pauses garbage collection: imports make hundreds of thousands of objects that are never freed, and scanning them
    repeatedly takes a sixth of the import time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_garbage_collection() -> None:
    """Excludes all objects that exist now from garbage collection. For a process of a server, after its start.

    A full collection scans every object of every imported module, which takes 0.1 to 0.2 s with torch, and no step or
    stream runs meanwhile. Afterwards it scans the requests in progress only, and collections are rarer.
    """
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 10, 10)
