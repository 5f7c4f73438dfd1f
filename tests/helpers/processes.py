"""Finds processes and POSIX shared memory that an engine in a test has leaked.

An environment variable, which child processes inherit, tags the processes of one test.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

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
    """Processes with the tag, except zombies and this process. Each has `info`: its id and its command line."""
    found = []
    for pid in _processes_with(f"{TAG}={tag}".encode()):
        try:
            process = psutil.Process(pid)
            if pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                process.info = process.as_dict(["pid", "cmdline"])
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found


def _processes_with(entry: bytes) -> list[int]:
    """Ids of processes with this entry in their environment.

    Tests ask 20 times a second, so /proc is read directly: psutil takes ten times as long.
    """
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                content = file.read()
        except OSError:  # it has ended, or is another user's
            continue
        if entry in content and entry in content.split(b"\0"):
            found.append(int(pid))
    return found


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
    wait_until(
        lambda: not tagged_processes(tag),
        seconds,
        lambda: f"processes are left: {[process.info for process in tagged_processes(tag)]}",
    )
    assert_no_new_shared_memory(shared_memory_before, seconds)


def assert_no_new_shared_memory(before: set[str], seconds: float = 60.0) -> None:
    """Fails when shared memory of mvllm that was not there before is left after `seconds`.

    Segments of programs that run beside this one are removed in that time, and newer ones do not count.
    """
    new = {name for name in shared_memory_names() - before if "mvllm" in name}
    wait_until(
        lambda: not new & shared_memory_names(),
        seconds,
        lambda: f"shared memory is left: {sorted(new & shared_memory_names())}",
    )


def wait_until(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Returns when `condition` holds; fails with `what` when it does not hold within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.05)


def shared_memory_names() -> set[str]:
    """Names of this user's shared-memory segments."""
    folder = Path("/dev/shm")
    found = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            if path.stat().st_uid == os.getuid():
                found.add(path.name)
        except FileNotFoundError:
            continue
    return found
