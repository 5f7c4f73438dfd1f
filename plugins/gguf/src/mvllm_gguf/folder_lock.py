"""Locks derived folders that running processes use, so that other processes do not remove them.

A process that uses a folder holds a shared lock (flock) on a file in it until the process ends. A process may remove a
folder only with the exclusive lock. Without support for file locks, folders are not locked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

fcntl: Any = None
with contextlib.suppress(ImportError):  # not available on Windows
    fcntl = importlib.import_module("fcntl")

LOCK_NAME = ".in-use"

_held: dict[tuple[int, int], int] = {}
"""Descriptors of the locks of this process, by device and inode of the file."""


def hold(folder: Path) -> bool:
    """Locks a folder (shared) until this process ends. Idempotent.

    Returns:
        False if another process is removing the folder, or has removed it.
    """
    if fcntl is None:
        return folder.is_dir()
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # written by a version without locks, or not readable
        return folder.is_dir()
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    except OSError:  # a file system without locks
        os.close(file)
        return folder.is_dir()
    found = os.fstat(file)
    key = found.st_dev, found.st_ino
    if _held.setdefault(key, file) != file:
        os.close(file)
    return (folder / LOCK_NAME).exists()  # it may have been renamed before it was locked


@contextlib.contextmanager
def removing(folder: Path) -> Iterator[bool]:
    """Locks a folder (exclusive) for removal in the `with` statement. Yields False if another process uses it."""
    if fcntl is None:
        yield True
        return
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(file)
