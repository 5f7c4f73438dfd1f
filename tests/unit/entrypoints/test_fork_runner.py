"""Functions in a forked process: results, crashes and timeouts."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from mvllm.entrypoints.cli.fork_runner import ForkResult, run_in_fork

CHANGED: list[int] = []


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def raise_exit() -> None:
    print("noise")
    sys.exit("no device")


def change() -> int:
    CHANGED.append(1)
    return len(CHANGED)


def test_each_function_has_a_result_also_after_a_crash(capfd: pytest.CaptureFixture[str]) -> None:
    found = run_in_fork([change, change, crash, change, raise_exit, leave, change], 60)
    assert found == [
        ForkResult(1),
        ForkResult(2),  # runs in the same process, with its imports
        ForkResult(failure="its process was ended by signal 9 (SIGKILL)"),
        ForkResult(1),
        ForkResult(failure="SystemExit: no device"),
        ForkResult(failure="its process ended with exit status 3"),
        ForkResult(1),
    ]
    assert CHANGED == []
    assert capfd.readouterr() == ("", "")


def test_a_function_that_exceeds_the_timeout_is_killed() -> None:
    def hang() -> Any:
        time.sleep(600)

    assert run_in_fork([hang, change], 0.5) == [ForkResult(failure="no answer in 0.5 s"), ForkResult(1)]
