"""Exit of a server program with busy threads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, threading, time
from mvllm.entrypoints.shutdown_signals import exit_on_signals, force_exit_after, exit_program
exit_on_signals()
atexit.register(lambda: print("exit functions are run"))
"""


def run(rest: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM + rest], capture_output=True, text=True, timeout=120)


def test_it_does_not_wait_for_a_thread_that_is_busy() -> None:
    ended = run("threading.Thread(target=time.sleep, args=(1000,)).start()\nprint('a')\nexit_program(3)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "a\nexit functions are run\n", "")


def test_the_timer_ends_a_blocked_interpreter_and_prints_its_stack() -> None:
    ended = run("force_exit_after(0.5)\nsum(7 ** (10**9) for _ in range(2))")
    assert ended.returncode == 1 and "Timeout" in ended.stderr and "<module>" in ended.stderr


def test_other_processes_have_no_timer() -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "from mvllm.entrypoints.shutdown_signals import *; force_exit_after(0.01); time.sleep(0.1)",
        ],
        capture_output=True,
        timeout=60,
    )
    assert b"Timeout" not in ended.stderr
