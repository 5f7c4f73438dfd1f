"""Checks that the compute runtime is installed: Level Zero's loader and the driver that it loads.

The libraries are searched, not loaded, because loading the driver starts it. The search covers the linker's cache file,
which lists each library's name, and the folders of LD_LIBRARY_PATH and of Python's environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

LOADER = "libze_loader.so.1"
DRIVER = "libze_intel_gpu.so.1"

_CACHE = Path("etc/ld.so.cache")
_FOLDERS = (Path("usr/lib/x86_64-linux-gnu"), Path("usr/lib64"), Path("usr/lib"), Path("usr/local/lib"))

_REMEDY = (
    "Install the compute runtime: the packages libze1 and libze-intel-gpu1 on Debian and Ubuntu, level-zero and "
    "intel-level-zero-gpu (or intel-compute-runtime) elsewhere; a container needs them, too."
)


def missing(root: Path, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The missing part and the remedy; None if nothing is missing.

    Args:
        root: Root folder of the files.
        environ: Environment variables of the process.
    """
    for name, what in ((LOADER, "Level Zero's loader"), (DRIVER, "Level Zero's driver for GPUs")):
        if not _is_installed(name, root, environ):
            return f"{what} is not installed: {name} is not found", _REMEDY
    return None


def _is_installed(name: str, root: Path, environ: Mapping[str, str]) -> bool:
    try:
        if f"{name}\0".encode() in (root / _CACHE).read_bytes():
            return True
    except OSError:
        pass  # a system without a linker cache
    named = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders = [*named, Path(sys.prefix) / "lib", *(root / folder for folder in _FOLDERS)]
    return any((folder / name).exists() for folder in folders)
