"""Marks derived folders that running processes use, so that nobody removes them.

A process that uses a folder holds a shared lock on a file in it until the process ends, however it ends. Whoever wants
to remove the folder needs the exclusive lock, and leaves the folder alone without it. Where files cannot be locked,
nothing is marked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

fcntl: Any = None
with contextlib.suppress(ImportError):  # Windows has none
    fcntl = importlib.import_module("fcntl")

LOCK_NAME = ".in-use"

_held: dict[tuple[int, int], int] = {}
"""Descriptors of the locks of this process, by device and inode of the file."""


def hold(folder: Path) -> bool:
    """Marks a folder as used until this process ends. Idempotent.

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
    if key in _held:
        os.close(file)
    else:
        _held[key] = file
    return (folder / LOCK_NAME).exists()  # it may have got another name before it was locked


@contextlib.contextmanager
def removing(folder: Path) -> Iterator[bool]:
    """Whether a folder may be removed in the `with` statement: nobody uses it, and nobody can begin to."""
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
