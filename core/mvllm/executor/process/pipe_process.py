"""Child processes that answer msgpack messages over their standard input and output."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Literal, TypeVar

import msgspec

from mvllm.executor.process.message_frames import encode_frame, read_frame
from mvllm.executor.process.process_utils import module_search_path

_T = TypeVar("_T")

_ATTEMPTS = 2


class PipeProcessError(Exception):
    """A PipeProcess has not answered.

    Attributes:
        reason: `time` or `memory`: the job exceeded this limit. `timeout`: no answer in time. `killed`: something else
            killed the process, twice. `closed`: after `close`.
    """

    def __init__(self, reason: Literal["time", "memory", "timeout", "killed", "closed"]) -> None:
        super().__init__(reason)
        self.reason = reason


class PipeProcess:
    """A child process that answers one message at a time, started on demand and again after it had to be killed.

    `start` and `run` are called from one thread, which must live as long as the process; `close` from any.

    Args:
        module: What the process runs.
        first_message: Written to each new process.
    """

    def __init__(self, module: str, first_message: msgspec.Struct | None = None) -> None:
        self._module = module
        self._first_message = first_message
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> subprocess.Popen[bytes] | None:
        """Starts the process if it does not run; None after `close`."""
        with self._lock:
            if self._closed:
                return None
            if self._process is not None and self._process.poll() is None:
                return self._process
            self._process = process = start_pipe_process(self._module)
        if self._first_message is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # `run` finds the broken pipe
                write_message(process.stdin, self._first_message)
        return process

    def run(self, job: msgspec.Struct, kind: type[_T], seconds: float) -> _T:
        """Sends a job and returns the answer.

        Args:
            seconds: Longest wait for the answer.

        Raises:
            PipeProcessError: There is no answer. The process has been killed.
        """
        for _ in range(_ATTEMPTS):
            process = self.start()
            if process is None:
                raise PipeProcessError("closed")
            assert process.stdin is not None and process.stdout is not None
            try:
                write_message(process.stdin, job)
                return receive_message(process.stdout, kind, seconds)
            except TimeoutError as e:
                self.kill()
                raise PipeProcessError("timeout") from e
            except (EOFError, OSError) as e:
                limit = find_exceeded_limit(process, seconds)
                self.kill()
                if limit is not None:
                    raise PipeProcessError(limit) from e
        raise PipeProcessError("killed")

    def kill(self) -> None:
        """Kills the process; the next job starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            kill_pipe_process(process)

    def close(self) -> None:
        """Kills the process for good. Idempotent."""
        self._closed = True
        self.kill()


def start_pipe_process(module: str) -> subprocess.Popen[bytes]:
    """Starts `python -m module <pid of this process>`."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a crash in native code might print user data
        env={**os.environ, "PYTHONPATH": os.pathsep.join(module_search_path())},
        start_new_session=True,  # Ctrl-C signals the parent only
    )


def kill_pipe_process(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # buffered bytes have no reader left
            if pipe is not None:
                pipe.close()


def find_exceeded_limit(process: subprocess.Popen[bytes], seconds: float) -> Literal["time", "memory"] | None:
    """The limit that ended a process whose pipes are closed: `time` or `memory`; None if a signal did.

    Args:
        seconds: Time to wait for its end; a process that runs longer exceeds `time`.
    """
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "time"
    if status == -signal.SIGXCPU:
        return "time"
    return None if status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT) else "memory"


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Writes one message, whole."""
    stream.write(encode_frame(msgspec.msgpack.encode(message)))
    stream.flush()


def read_message(stream: IO[bytes], kind: type[_T]) -> _T:
    """Reads one message.

    Raises:
        EOFError: The other process has closed its end.
    """
    return msgspec.msgpack.decode(read_frame(stream.read), type=kind)


def receive_message(stream: IO[bytes], kind: type[_T], seconds: float) -> _T:
    """Reads one message within a time limit, past the buffer of `stream`.

    Raises:
        EOFError: The other process has closed its end.
        TimeoutError: The message was not complete after `seconds`.
    """
    deadline = time.monotonic() + seconds
    fd = stream.fileno()
    poll = select.poll()  # select() takes no descriptor from 1024 on
    poll.register(fd, select.POLLIN)

    def read(size: int) -> bytes:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError
        return os.read(fd, size)

    return msgspec.msgpack.decode(read_frame(read), type=kind)
