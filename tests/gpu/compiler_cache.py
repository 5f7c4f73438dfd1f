"""Keeps what Triton has compiled in the output folder, because the machine may be gone after the call.

OUT/compiler-cache.tar.gz   written every 25 s and at the end, read at the beginning
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.clock import SYSTEM, Clock, Repeated

ARCHIVE = "compiler-cache.tar.gz"
SECONDS = 25.0
VARIABLE = "TRITON_CACHE_DIR"


@contextlib.contextmanager
def kept_compiler_cache(folder: Path, out: Path, seconds: float = SECONDS, clock: Clock = SYSTEM) -> Iterator[None]:
    """Processes that are started in this context compile into `folder`, which is copied to `out`.

    Args:
        folder: Filled from the archive in `out`, if there is one.
        out: Where the archive is.
        seconds: Between two copies.
        clock: Measures them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (out / ARCHIVE).is_file():
        with contextlib.suppress(tarfile.TarError, OSError), tarfile.open(out / ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
    before, os.environ[VARIABLE] = os.environ.get(VARIABLE), str(folder)
    try:
        with Repeated(lambda: pack(folder, out), seconds, clock).in_thread():
            yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def pack(folder: Path, out: Path) -> None:
    """Replaces the archive; files that compilers are just writing are left out."""
    draft = out / f"{ARCHIVE}.new"
    with tarfile.open(draft, "w:gz", compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not _is_unfinished(path.relative_to(folder)):
                with contextlib.suppress(OSError):
                    archive.add(path, str(path.relative_to(folder)))
    draft.replace(out / ARCHIVE)


def _is_unfinished(path: Path) -> bool:
    """Whether a file is one that Triton moves into place later: it writes into folders `tmp.pid_...`."""
    return ".tmp" in path.name or any(part.startswith("tmp.") for part in path.parts)
