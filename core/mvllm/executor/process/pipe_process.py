"""Child processes that answer messages over their standard input and output.

A message is 4 bytes of length, little-endian, then msgpack.
"""

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

from mvllm.executor.process.process_utils import module_search_path

_T = TypeVar("_T")


def start_pipe_process(module: str) -> subprocess.Popen[bytes]:
    """Starts `python -m module <pid of this process>`."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a crash of native code would print what a user has sent
        env={**os.environ, "PYTHONPATH": os.pathsep.join(module_search_path())},
        start_new_session=True,  # Ctrl-C is the parent's business
    )


def kill_pipe_process(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # buffered bytes have no reader any more
            if pipe is not None:
                pipe.close()


def find_exceeded_limit(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """The limit that ended a process whose pipes are closed: `time` or `memory`; None if a person or a program did.

    Args:
        seconds: How long it may take to end; more counts as `time`.
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
    payload = msgspec.msgpack.encode(message)
    stream.write(len(payload).to_bytes(4, "little") + payload)
    stream.flush()


def read_message(stream: IO[bytes], kind: type[_T]) -> _T:
    """Reads one message.

    Raises:
        EOFError: The other side has ended.
    """
    head = stream.read(4)
    payload = stream.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    if len(head) < 4 or len(payload) < int.from_bytes(head, "little"):
        raise EOFError
    return msgspec.msgpack.decode(payload, type=kind)


def receive_message(stream: IO[bytes], kind: type[_T], seconds: float) -> _T:
    """Reads one message from an unbuffered or unread stream, within a time.

    Raises:
        EOFError: The other side has ended.
        TimeoutError: The message was not complete after `seconds`.
    """
    deadline = time.monotonic() + seconds
    size = int.from_bytes(_receive(stream.fileno(), 4, deadline), "little")
    return msgspec.msgpack.decode(_receive(stream.fileno(), size, deadline), type=kind)


def _receive(fd: int, size: int, deadline: float) -> bytes:
    parts = bytearray()
    poll = select.poll()  # select() takes no descriptor from 1024 on
    poll.register(fd, select.POLLIN)
    while len(parts) < size:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError
        part = os.read(fd, size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
