"""A hash of the weights of a model folder or of an adapter: those with equal hashes have equal weights.

Files are read whole. So that a model is read once and not at each start, the hash of a file is kept in the cache folder
(`MVLLM_CACHE_DIR`) with the file's size and time of change.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mvllm.checkpoint_formats.registry import source_files

_SUFFIXES = (".safetensors", ".bin", ".pt")
_CACHE_FILE = "weight-hashes.json"
_MOST_ENTRIES = 1000
_CHUNK = 1 << 22


def weights_fingerprint(path: Path) -> str:
    """The hash of all files with weights of a model folder, or of one file. Equal files give equal hashes anywhere.

    Raises:
        OSError: A file cannot be read, or there is none.
    """
    return files_fingerprint(_files_of(path))


def files_fingerprint(files: Sequence[Path]) -> str:
    """The hash of files, in this order. Equal files of equal names give equal hashes anywhere.

    Raises:
        OSError: A file cannot be read.
    """
    known = _read_known()
    keys = [_key_of(file) for file in files]
    missing = [(key, file) for key, file in zip(keys, files, strict=True) if key not in known]
    if missing:
        with ThreadPoolExecutor(max_workers=4) as threads:
            found = list(threads.map(_hash_file, [file for _, file in missing]))
        known.update({key: digest for (key, _), digest in zip(missing, found, strict=True)})
        _write_known(known)
    whole = hashlib.sha256()
    for key, file in zip(keys, files, strict=True):
        whole.update(f"{file.name} {known[key]}\n".encode())
    return whole.hexdigest()


def _files_of(path: Path) -> list[Path]:
    """The files with weights of a model folder, which may be derived from files elsewhere."""
    if path.is_file():
        return [path]
    if sources := source_files(path):
        return sources
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    if not files:
        raise FileNotFoundError(errno.ENOENT, "There are no files with weights", str(path))
    return files


def _key_of(file: Path) -> str:
    status = file.stat()
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _hash_file(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while data := opened.read(_CHUNK):
            digest.update(data)
    return digest.hexdigest()


def _cache_folders() -> Iterator[Path]:
    chosen, xdg = os.environ.get("MVLLM_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):  # the user has no home
        if chosen:
            yield Path(chosen).expanduser().absolute()
        else:
            yield (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "mvllm"


def _read_known() -> dict[str, str]:
    for folder in _cache_folders():
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((folder / _CACHE_FILE).read_bytes())
            if isinstance(found, dict):
                return {str(key): str(value) for key, value in found.items()}
    return {}


def _write_known(known: dict[str, str]) -> None:
    """Keeps the hashes, where a folder can be written."""
    newest = dict(list(known.items())[-_MOST_ENTRIES:])
    for folder in _cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f"{_CACHE_FILE}.{os.getpid()}"
            temporary.write_text(json.dumps(newest))
            os.replace(temporary, folder / _CACHE_FILE)
            return
