"""Runs commands with a small /dev/shm, as in a container: a tmpfs in a separate mount namespace."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

MIB = 1 << 20
WAYS = (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"])
"""unshare commands: for root, and for users who may create a user namespace."""


def mount(size: int) -> list[str]:
    """Command prefix that runs a command with a /dev/shm of `size` bytes."""
    way = usable_unshare_command()
    assert way is not None, "cannot mount a tmpfs here: mark the test with @needs_mount"
    return _command(way, size)


@functools.cache
def usable_unshare_command() -> list[str] | None:
    """The first unshare command in WAYS that works on this machine; None if none does."""
    if shutil.which("unshare") is None:
        return None
    for way in WAYS:
        if subprocess.run([*_command(way, MIB), "true"], capture_output=True, check=False).returncode == 0:
            return way
    return None


def _command(way: list[str], size: int) -> list[str]:
    return [*way, "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh"]


needs_mount = pytest.mark.skipif(
    usable_unshare_command() is None,
    reason="requires permission to mount a tmpfs in a new mount namespace (root, CAP_SYS_ADMIN or user namespaces)",
)
