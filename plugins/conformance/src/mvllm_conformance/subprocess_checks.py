"""Runs checks in new processes, where nothing has been imported or opened yet; lists open device files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ANSWER_PREFIX = "@mvllm-child "

_NOT_DEVICES = (
    "null",
    "zero",
    "full",
    "random",
    "urandom",
    "tty",
    "pts",
    "ptmx",
    "shm",
    "fd",
    "stdin",
    "stdout",
    "console",
)


def run_in_subprocess(
    module: str, order: dict[str, Any], *, seconds: float = 120.0, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Runs `python -m module ORDER` and returns the JSON object that it prints with `print_answer`.

    Args:
        module: The module to run.
        order: Its argument.
        seconds: Timeout.
        environment: Its environment variables; the module search path is this process's.

    Raises:
        AssertionError: It printed no answer; the message has its output.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(order)],
        env=child_environment(environment),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )
    for answer in read_answers(done.stdout):
        return answer
    raise AssertionError(f"{module} ended with status {done.returncode} and no answer:\n{done.stderr[-3000:]}")


def print_answer(answer: dict[str, Any]) -> None:
    """Called in the child: prints an answer as one line, which `read_answers` finds among what libraries print."""
    sys.stdout.write(f"\n{ANSWER_PREFIX}{json.dumps(answer)}\n")
    sys.stdout.flush()


def read_answers(output: str) -> Iterator[dict[str, Any]]:
    """The answers in a child's output."""
    for line in output.splitlines():
        if line.startswith(ANSWER_PREFIX):
            yield json.loads(line.removeprefix(ANSWER_PREFIX))


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a child: `variables`, and this process's module search path."""
    return {**variables, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def open_devices() -> set[str]:
    """Paths of the device files that this process has open; empty on systems without /proc."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").is_dir() else ():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("/dev/") and target.split("/")[2] not in _NOT_DEVICES:
            found.add(target)
    return found
