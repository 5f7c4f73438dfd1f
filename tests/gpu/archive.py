"""The results of a run as one file, which always is the last whole one.

OUT/gpu-run.tar.gz   rows, table, reports and logs; renewed every 15 s and at the end

What the compiler cache holds is not in it: it is a file of its own (compiler_cache.py).
"""

from __future__ import annotations

import contextlib
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from tests.gpu import compiler_cache

ARCHIVE = "gpu-run.tar.gz"
LEFT_OUT = "left-out.txt"
SECONDS = 15.0
LARGEST = 15 << 20  # bytes of the archive
LARGEST_LOG = 1 << 20  # bytes of the end of a log that are kept
FIRST = ("rows.jsonl", "items.txt", "table.md")
FILES = (".jsonl", ".txt", ".md", ".json", ".svg", ".log", ".gz")


def pack(folder: Path, file: Path, largest: int = LARGEST) -> None:
    """Replaces the archive `file` by one of the results in `folder`, the most important first.

    Files that would make it larger than `largest` are left out, and named in its `left-out.txt`. A reader, and a kill,
    finds the old archive or the new one.
    """
    draft = file.with_name(f"{file.name}.new")
    left_out, size = [], 0
    with tarfile.open(draft, "w:gz", compresslevel=6) as archive:
        for path in _results(folder):
            name = path.relative_to(folder).as_posix()
            try:
                content = path.read_bytes()
            except OSError:  # it has vanished meanwhile
                continue
            if path.suffix == ".log":
                content = content[-LARGEST_LOG:]
            packed = len(zlib.compress(content, 1)) + 1024  # with its header
            if size + packed > largest:
                left_out.append(f"{name}: {len(content)} bytes\n")
                continue
            size += packed
            _add(archive, name, content)
        if left_out:
            _add(archive, LEFT_OUT, "".join(left_out).encode())
    draft.replace(file)


def unpack(file: Path, folder: Path) -> None:
    """Unpacks an archive into `folder`, and the compiler cache that lies beside it.

    Raises:
        tarfile.TarError, OSError: It cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    with contextlib.suppress(FileNotFoundError):
        (folder / compiler_cache.ARCHIVE).symlink_to((file.parent / compiler_cache.ARCHIVE).resolve(strict=True))


def _results(folder: Path) -> Iterator[Path]:
    """Files of a run: those that `--resume` reads, then small and large ones."""
    found = {path for path in folder.rglob("*") if path.is_file() and path.suffix in FILES}
    found -= {folder / ARCHIVE, folder / compiler_cache.ARCHIVE}
    first = [folder / name for name in FIRST if folder / name in found]
    yield from first
    yield from sorted(found.difference(first), key=lambda path: (path.stat().st_size, path))


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
