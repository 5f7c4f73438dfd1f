"""Finds processes and shared memory that an engine has left behind.

Processes carry a tag in an environment variable, which children inherit.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

TAG = "CONFORMANCE_PROCESS_TAG"


@dataclass
class ProcessSnapshot:
    """The shared memory that existed at the start, and the tag of processes that are started later.

    Attributes:
        tag: The value of TAG in the environment of these processes.
    """

    tag: str = field(default_factory=lambda: uuid.uuid4().hex)
    _shared: set[str] = field(default_factory=lambda: shared_memory())

    def processes(self) -> list[psutil.Process]:
        """Living processes with the tag, except this one."""
        return tagged_processes(TAG, self.tag)

    def workers(self) -> list[psutil.Process]:
        """Tagged processes that are workers of an engine."""
        found = []
        for process in self.processes():
            try:
                if any(word == "Worker" or word.startswith("Worker_") for word in process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def assert_gone(self, seconds: float = 30.0) -> None:
        """Fails when a tagged process or new shared memory is left after `seconds`."""
        assert_nothing_left(self.processes, self._shared, seconds)


@contextmanager
def process_snapshot() -> Iterator[ProcessSnapshot]:
    """Tags the processes that are started in the context, and kills those that are left at its end."""
    before = os.environ.get(TAG)
    snapshot = ProcessSnapshot()
    os.environ[TAG] = snapshot.tag
    try:
        yield snapshot
    finally:
        if before is None:
            del os.environ[TAG]
        else:
            os.environ[TAG] = before
        for process in snapshot.processes():
            process.kill()


def tagged_processes(variable: str, tag: str) -> list[psutil.Process]:
    """Living processes that have `tag` in the environment variable `variable`, except zombies and this process.

    Each has `info`, with its process id and its command line.
    """
    found = []
    for pid in _processes_with(variable, tag):
        try:
            process = psutil.Process(pid)
            if pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                process.info = process.as_dict(["pid", "cmdline"])
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found


def _processes_with(variable: str, tag: str) -> list[int]:
    """Ids of processes with this environment.

    Tests ask 20 times a second, so /proc is read directly where there is one: psutil takes ten times as long.
    """
    pids = [name for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    if not pids:
        return [pid for pid in psutil.pids() if _environment(pid).get(variable) == tag]
    entry, found = f"{variable}={tag}".encode(), []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
                content = file.read()
        except OSError:  # it has ended, or is another user's
            continue
        if entry in content and entry in content.split(b"\0"):
            found.append(int(pid))
    return found


def _environment(pid: int) -> dict[str, str]:
    """Empty for processes that have ended, and those of other users."""
    try:
        return dict(psutil.Process(pid).environ())
    except psutil.Error:
        return {}


def assert_nothing_left(
    processes: Callable[[], list[psutil.Process]], shared_memory_before: set[str], seconds: float
) -> None:
    """Fails when processes or new shared-memory segments of mvllm are left after `seconds`.

    Args:
        processes: Lists the processes that must end.
        shared_memory_before: What `shared_memory` returned at the start.
    """
    wait_until(
        lambda: not processes(), seconds, lambda: f"processes are left: {[process.info for process in processes()]}"
    )
    assert_no_new_shared_memory(shared_memory_before, seconds)


def assert_no_new_shared_memory(before: set[str], seconds: float) -> None:
    """Fails when shared-memory segments of mvllm that were not there before are left after `seconds`.

    Segments of programs that run beside this one are removed in that time, and newer ones do not count.
    """
    new = {name for name in shared_memory() - before if "mvllm" in name}
    wait_until(
        lambda: not new & shared_memory(), seconds, lambda: f"shared memory is left: {sorted(new & shared_memory())}"
    )


def wait_until(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Returns when `condition` holds; fails with `what` when it does not hold within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.05)


def shared_memory() -> set[str]:
    """Names of this user's shared-memory segments."""
    folder = Path("/dev/shm")  # noqa: S108  (read, not written)
    found = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            if path.stat().st_uid == os.getuid():
                found.add(path.name)
        except FileNotFoundError:
            continue
    return found
