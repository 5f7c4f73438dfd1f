"""Runs functions in a forked child process, so that a crash ends neither this process nor the other functions.

`mvllm doctor` uses it for checks that may crash. A fork takes milliseconds where a new interpreter takes 0.2 s, and
imports of one function (above all torch) are available to the next. The child has a single thread and exits without
the parent's exit handlers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mvllm.platform.isolated_probes import read_line


@dataclass(frozen=True)
class ForkResult:
    """The result of one function.

    Attributes:
        value: Its return value.
        failure: Why there is no value: its exception, or how its process ended.
    """

    value: Any = None
    failure: str | None = None


def run_in_fork(functions: Sequence[Callable[[], Any]], timeout: float) -> list[ForkResult]:
    """Runs functions in order; returns one result for each. Their output is discarded.

    If the child process crashes or exceeds the timeout, another child runs the remaining functions.

    Args:
        functions: Return JSON values.
        timeout: Seconds for each function.
    """
    results: list[ForkResult] = []
    while len(results) < len(functions):
        results += _run_until_crash(functions[len(results) :], timeout)
    return results


def _run_until_crash(functions: Sequence[Callable[[], Any]], timeout: float) -> list[ForkResult]:
    """Runs functions in one child until it ends; the last result is that of the function in which it ended."""
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, of which this command has none
        pid = os.fork()
    if pid == 0:
        _serve(functions, receive, send)
    os.close(send)
    results: list[ForkResult] = []
    has_ended = False
    try:
        with os.fdopen(receive, "rb", buffering=0) as pipe:
            for _ in functions:
                line = read_line(pipe.fileno(), time.monotonic() + timeout)
                has_ended = line == b""
                if not line:
                    break
                results.append(ForkResult(**json.loads(line)))
            else:
                has_ended = True
    finally:
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if len(results) < len(functions):
        results.append(ForkResult(failure=_describe(status) if has_ended else f"no answer in {timeout:g} s"))
    return results


def _serve(functions: Sequence[Callable[[], Any]], receive: int, send: int) -> None:
    """Main function of the child: runs the functions, writes their results, exits."""
    try:
        os.close(receive)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        for stream in (1, 2):  # output of native code
            os.dup2(sys.stdout.fileno(), stream)
        for function in functions:
            try:
                answer = {"value": function()}
            except BaseException as e:  # noqa: BLE001  (a checked plugin may raise anything, SystemExit too)
                answer = {"failure": traceback.format_exception_only(e)[-1].strip()}
            os.write(send, json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"its process was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"its process ended with exit status {code}"
