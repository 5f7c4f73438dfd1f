"""Runs programs with a small /dev/shm, as in a container: a tmpfs in a mount namespace of their own."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

MIB = 1 << 20
WAYS = (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"])
"""Commands for root, and for users who may create a user namespace."""


def mount(size: int) -> list[str]:
    """Prefix of a command that gives it a /dev/shm of `size` bytes."""
    way = way_to_mount()
    assert way is not None, "see needs_mount"
    return _command(way, size)


@functools.cache
def way_to_mount() -> list[str] | None:
    """One of WAYS that is allowed here."""
    if shutil.which("unshare") is None:
        return None
    for way in WAYS:
        if subprocess.run([*_command(way, MIB), "true"], capture_output=True, check=False).returncode == 0:
            return way
    return None


def _command(way: list[str], size: int) -> list[str]:
    return [*way, "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]


needs_mount = pytest.mark.skipif(
    way_to_mount() is None,
    reason="needs the right to mount a file system in a namespace of its own (root, or CAP_SYS_ADMIN)",
)
