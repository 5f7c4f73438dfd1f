"""Child processes that answer msgpack messages over their standard input and output."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import IO, TypeVar

import msgspec

from mvllm.executor.process.message_frames import encode_frame, read_frame
from mvllm.executor.process.process_utils import module_search_path

_T = TypeVar("_T")


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


def find_exceeded_limit(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """The limit that ended a process whose pipes are closed: `time` or `memory`; None if it was killed by a signal.

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
