"""Finds processes and POSIX shared memory that an engine in a test has leaked.

An environment variable, which child processes inherit, tags the processes of one test.
"""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import psutil

from mvllm.testing import leftover_processes
from mvllm.testing.leftover_processes import shared_memory as shared_memory_names
from mvllm.testing.leftover_processes import wait_until

__all__ = [
    "TAG",
    "assert_no_new_shared_memory",
    "assert_nothing_left",
    "worker_processes",
    "new_tag",
    "is_reading_stdin",
    "shared_memory_names",
    "is_sleeping",
    "stop_process",
    "tagged_processes",
    "wait_until",
]

TAG = "PROCESS_TAG"


def new_tag() -> str:
    return uuid.uuid4().hex


def tagged_processes(tag: str) -> list[psutil.Process]:
    """Processes with the tag, except zombies and this process."""
    return leftover_processes.tagged_processes(TAG, tag)


def worker_processes(tag: str, *names: str) -> list[psutil.Process]:
    """Tagged processes whose command line contains one of these worker names."""
    found = []
    for process in tagged_processes(tag):
        try:
            if set(names).intersection(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def is_sleeping(pid: int) -> bool:
    """Whether the main thread of a process is in a timed sleep such as `time.sleep`."""
    return _system_call(pid)[0] in ("35", "230", "115", "101")  # nanosleep and clock_nanosleep, on x86-64 and arm64


def is_reading_stdin(pid: int) -> bool:
    """Whether the main thread of a process is blocked reading stdin."""
    return _system_call(pid)[:2] in (["0", "0x0"], ["63", "0x0"])  # read, on x86-64 and arm64


def stop_process(pid: int) -> None:
    """Sends SIGSTOP and waits until every thread of the process is stopped.

    The signal is handled by one thread, usually the main thread. Until that thread is scheduled, which takes a while on
    a busy machine, the others go on.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state in "Tt" for state in _thread_states(pid)), 120, f"every thread of {pid} is stopped")


def _thread_states(pid: int) -> list[str]:
    """The state letter of each thread, as in `/proc/PID/task/TID/stat`."""
    return [_state(task / "stat") for task in Path(f"/proc/{pid}/task").iterdir()]


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:  # the thread has ended
        return "T"


def _system_call(pid: int) -> list[str]:
    """Number and arguments of the current system call; other text if there is none or the process has ended."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return ["gone"]


def assert_nothing_left(tag: str, shared_memory_before: set[str], seconds: float = 60.0) -> None:
    """Fails when tagged processes or new shared memory of mvllm are left after `seconds`."""
    leftover_processes.assert_nothing_left(lambda: tagged_processes(tag), shared_memory_before, seconds)


def assert_no_new_shared_memory(before: set[str], seconds: float = 60.0) -> None:
    """Fails when shared memory of mvllm that was not there before is left after `seconds`."""
    leftover_processes.assert_no_new_shared_memory(before, seconds)
