"""Finds processes that a test's engine has left behind, by a tag in their environment that children inherit."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

TAG = "PROCESS_TAG"


def new_tag() -> str:
    return uuid.uuid4().hex


def tagged(tag: str) -> list[psutil.Process]:
    """Living processes with the tag, zombies and this process left out."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if process.pid == os.getpid():
            continue
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == tag:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def named(tag: str, name: str) -> list[psutil.Process]:
    """Processes whose command line names the worker `name`."""
    found = []
    for process in tagged(tag):
        try:
            if name in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def sleeps(pid: int) -> bool:
    """Whether its main thread is in a timed sleep, such as time.sleep."""
    return _system_call(pid)[0] in ("35", "230", "115", "101")  # nanosleep and clock_nanosleep, on x86-64 and arm64


def reads_input(pid: int) -> bool:
    """Whether its main thread waits for its standard input."""
    return _system_call(pid)[:2] in (["0", "0x0"], ["63", "0x0"])  # read, on x86-64 and arm64


def _system_call(pid: int) -> list[str]:
    """System call of its main thread, with arguments; another text while it computes or after its end."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return ["gone"]


def wait_until(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Waits for `condition`; after the timeout raises with `what`, a text or a function that makes it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.05)


def shared_memory_names() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if path.stat().st_uid == os.getuid()} if folder.is_dir() else set()


def assert_nothing_left(tag: str, shared_memory_before: set[str], seconds: float = 10.0) -> None:
    wait_until(lambda: not tagged(tag), seconds, lambda: f"processes left: {[p.info for p in tagged(tag)]}")
    left = {name for name in shared_memory_names() - shared_memory_before if "mvllm" in name}
    assert not left, left
