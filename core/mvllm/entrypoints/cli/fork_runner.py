"""Runs functions in a fork of this process, so that a crash of one ends neither this process nor the others.

For a command that looks at what may be broken. A fork costs milliseconds where a fresh interpreter costs a fifth of a
second, and what one function imports (torch, above all) is there for the next. The fork runs no thread but its own, and
ends without this process's exit handlers.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ForkResult:
    """How a function ended.

    Attributes:
        value: What it returned.
        failure: Why there is no value: the exception that it raised, or how its process ended.
    """

    value: Any = None
    failure: str | None = None


def run_in_fork(functions: Sequence[Callable[[], Any]], timeout: float) -> list[ForkResult]:
    """The outcome of each function, in order. What they print is dropped.

    Where the process of one ends or takes too long, those behind it get another process.

    Args:
        functions: Return what JSON can hold.
        timeout: Seconds that each may take.
    """
    outcomes: list[ForkResult] = []
    while len(outcomes) < len(functions):
        outcomes += _run_until_crash(functions[len(outcomes) :], timeout)
    return outcomes


def _run_until_crash(functions: Sequence[Callable[[], Any]], timeout: float) -> list[ForkResult]:
    """As many outcomes as one process gives, and that of the function that it ended in."""
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which this command has none
        pid = os.fork()
    if pid == 0:
        _serve(functions, receive, send)
    os.close(send)
    outcomes: list[ForkResult] = []
    has_ended = False
    try:
        with os.fdopen(receive, "rb", buffering=0) as pipe:
            for _ in functions:
                line = _read_line(pipe.fileno(), time.monotonic() + timeout)
                has_ended = line == b""
                if not line:
                    break
                outcomes.append(ForkResult(**json.loads(line)))
            else:
                has_ended = True
    finally:
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if len(outcomes) < len(functions):
        outcomes.append(ForkResult(failure=_describe(status) if has_ended else f"no answer in {timeout:g} s"))
    return outcomes


def _read_line(fd: int, deadline: float) -> bytes | None:
    """A line; nothing at the end of the pipe; None at the deadline."""
    found = b""
    while not found.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        piece = os.read(fd, 1)  # what is behind the line is the next one's
        if not piece:
            return b""
        found += piece
    return found


def _serve(functions: Sequence[Callable[[], Any]], receive: int, send: int) -> None:
    """The fork's whole life."""
    try:
        os.close(receive)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        for stream in (1, 2):  # for what is not Python's
            os.dup2(sys.stdout.fileno(), stream)
        for function in functions:
            try:
                answer = {"value": function()}
            except BaseException as e:  # noqa: BLE001  (also SystemExit: whatever is looked at may raise anything)
                answer = {"failure": traceback.format_exception_only(e)[-1].strip()}
            os.write(send, json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"its process was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"its process ended with exit status {code}"
