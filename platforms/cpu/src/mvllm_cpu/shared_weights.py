"""Packed weights in files that several processes map: MVLLM_CPU_SHARED_WEIGHTS=FOLDER.

The name of a file is a hash of all that its contents depend on: the loaded weight (its bytes, so any checkpoint, shard
or adapter), the kind of weight and its sizes, the library of kernels and its instruction sets. So a file never becomes
outdated, and a process that finds it maps it and packs nothing:

    | header: JSON, one page | tensor | tensor | ...      each tensor begins at a page

A file is written under a temporary name and then linked: of two writers, one creates the file, and both map it. Without
space or permission, and where a file is not valid and cannot be replaced, weights are packed into private memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from mvllm.plugin_api import get_logger
from mvllm_cpu import kernels

logger = get_logger("mvllm.cpu.shared_weights")

VARIABLE = "MVLLM_CPU_SHARED_WEIGHTS"

FORMAT = 1
"""Raise it with any change of this file's layout, or of what Python code packs before the kernels do."""

_MAGIC = "mvllm-cpu packed weight"
_SUFFIX = ".packed"
_DRAFT_SUFFIX = ".draft"
_OLD_DRAFT_SECONDS = 3600  # drafts of processes that were killed are deleted after this time
_HASHED_AT_ONCE = 4 << 20


class Memory(Protocol):
    """Memory that a weight is packed into."""

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `count` zeros."""


@dataclass(frozen=True)
class Packed:
    """A packed weight.

    Attributes:
        tensors: Its tensors, in the order of their allocation; not to be written to.
        numbers: What else describes it.
    """

    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...] = ()


Pack = Callable[[Memory], Packed]
"""Packs a weight into memory that it allocates. It may be called a second time if the first raised OSError."""


def pack(kind: str, facts: Sequence[int], sources: Sequence[torch.Tensor | None], pool: Memory, fill: Pack) -> Packed:
    """The packed weight: mapped from its file if sharing is on, else packed into `pool`.

    Args:
        kind: Distinguishes packings with equal facts and sources.
        facts: Numbers on which the packing depends in addition to the shapes and dtypes of `sources`.
        sources: What is packed.
        pool: Private memory.
        fill: Packs.
    """
    store = current_store()
    if store is None:
        return fill(pool)
    return store.find_or_write(store.key(kind, facts, sources), fill) or fill(pool)


def share(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """The same values, mapped from a file if sharing is on. For weights that are known only after they were packed."""
    store = current_store()
    if store is None:
        return tensor

    def copy(memory: Memory) -> Packed:
        copied = memory.zeros(tensor.numel(), tensor.dtype)
        copied.copy_(tensor.view(-1))
        return Packed((copied,))

    found = store.find_or_write(store.key(kind, (), (tensor,)), copy)
    return tensor if found is None else _read_only(found.tensors[0].view(tensor.shape))


def current_store() -> WeightStore | None:
    """The store that the environment names; None if sharing is off."""
    folder = os.environ.get(VARIABLE, "")
    return _store_of(Path(folder)) if folder not in ("", "0") else None


def log_summary() -> None:
    """Logs how many weights were mapped and written since the last call, if sharing is on."""
    store = current_store()
    if store is not None:
        store.log_summary()


@cache
def _store_of(folder: Path) -> WeightStore:
    return WeightStore(folder)


class WeightStore:
    """The files of a folder.

    Args:
        folder: Created when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False
        self._num_mapped = self._num_written = self._num_bytes = 0
        self._lock = threading.Lock()

    def key(self, kind: str, facts: Sequence[int], sources: Sequence[torch.Tensor | None]) -> str:
        """The name of a weight's file, without suffix."""
        described: list[Any] = [FORMAT, mmap.PAGESIZE, _kernels_id(), kind, list(facts)]
        for source in sources:
            if source is None:
                described.append(None)
            else:
                described.append([str(source.dtype), list(source.shape), _digest(source)])
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def find_or_write(self, key: str, fill: Pack) -> Packed | None:
        """The weight of this key, packed into a new file if there is none. None if no file can be written."""
        found = self._map(key)
        if found is None:
            found = self._write(key, fill)
            self._count(found, written=True)
        else:
            self._count(found, written=False)
        return found

    def log_summary(self) -> None:
        """Logs the files since the last call."""
        with self._lock:
            mapped, written, num_bytes = self._num_mapped, self._num_written, self._num_bytes
            self._num_mapped = self._num_written = self._num_bytes = 0
        if mapped or written:
            logger.info(
                "Shared weights: %d mapped, %d packed and written, %.0f MB in %s.",
                *(mapped, written, num_bytes / 1e6, self._folder),
            )

    def _count(self, found: Packed | None, *, written: bool) -> None:
        if found is not None:
            with self._lock:
                self._num_written += written
                self._num_mapped += not written
                self._num_bytes += sum(tensor.nbytes for tensor in found.tensors)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _map(self, key: str) -> Packed | None:
        """Maps a file; None if there is none, or if it is not valid."""
        try:
            file = os.open(self._path(key), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except OSError:
            return None
        try:
            header = _checked_header(file, key)
            if header is None:
                return None
            region = mmap.mmap(file, header["bytes"], flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(file)
        _advise(region)
        tensors = [_tensor(region, offset, count, dtype) for offset, count, dtype in header["tensors"]]
        return Packed(tuple(tensors), tuple(header["numbers"]))

    def _write(self, key: str, fill: Pack) -> Packed | None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._delete_old_drafts()
            file, draft = tempfile.mkstemp(dir=self._folder, suffix=_DRAFT_SUFFIX)
        except OSError as e:
            self._warn(e)
            return None
        try:
            memory = _FileMemory(file)
            packed = fill(memory)
            memory.finish(key, packed.numbers)
            del packed, memory  # unmaps the draft
            os.fsync(file)
            try:
                os.link(draft, self._path(key))
            except FileExistsError:  # another process has just written it, or it is damaged
                if (found := self._map(key)) is not None:
                    return found
                os.replace(draft, self._path(key))
            return self._map(key)
        except OSError as e:
            self._warn(e)
            return None
        finally:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(draft)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Weights are packed into private memory, because nothing can be written to %s=%s: %s.",
                *(VARIABLE, self._folder, error.strerror or error),
            )

    def _delete_old_drafts(self) -> None:
        for draft in self._folder.glob(f"*{_DRAFT_SUFFIX}"):
            with contextlib.suppress(OSError):
                if time.time() - draft.stat().st_mtime > _OLD_DRAFT_SECONDS:
                    draft.unlink()


class _FileMemory:
    """Allocates tensors in a file, after a page for the header.

    Args:
        file: Descriptor of an empty file.
    """

    def __init__(self, file: int) -> None:
        self._file, self._end = file, mmap.PAGESIZE
        self._tensors: list[tuple[int, int, str]] = []

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `count` zeros.

        Raises:
            OSError: There is not enough space. (Writing to pages without space would end the process.)
        """
        size = -(-max(1, count * dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.posix_fallocate(self._file, self._end, size)
        region = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED, offset=self._end)
        _advise(region)
        self._tensors.append((self._end, count, str(dtype).removeprefix("torch.")))
        self._end += size
        return torch.frombuffer(region, dtype=dtype, count=count)

    def finish(self, key: str, numbers: Sequence[int]) -> None:
        """Writes the header."""
        header = {"magic": _MAGIC, "key": key, "bytes": self._end, "tensors": self._tensors, "numbers": list(numbers)}
        text = json.dumps(header).encode()
        assert len(text) < mmap.PAGESIZE, "a weight has a few tensors"
        os.pwrite(self._file, text.ljust(mmap.PAGESIZE), 0)


def _checked_header(file: int, key: str) -> dict[str, Any] | None:
    """The header of a file; None if the file is not complete, is not of this key, or belongs to another user."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return None
    header = json.loads(os.pread(file, mmap.PAGESIZE, 0))
    if not isinstance(header, dict) or (header.get("magic"), header.get("key")) != (_MAGIC, key):
        return None
    if header.get("bytes") != found.st_size:
        return None
    for offset, count, dtype in header["tensors"]:
        if offset < mmap.PAGESIZE or offset + count * getattr(torch, dtype).itemsize > found.st_size:
            return None
    return header


def _tensor(region: mmap.mmap, offset: int, count: int, dtype: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return _read_only(torch.frombuffer(region, dtype=getattr(torch, dtype), count=count, offset=offset))


def _read_only(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, marked for core: a weight update replaces it instead of writing to it."""
    tensor.is_read_only = True  # type: ignore[attr-defined]
    return tensor


def _advise(region: mmap.mmap) -> None:
    """Asks for huge pages, which some systems have for files in memory."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)


def _digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the hashes of the tensor's pieces, which several threads compute."""
    held = tensor.detach().contiguous()
    data = memoryview((ctypes.c_char * held.nbytes).from_address(held.data_ptr())) if held.nbytes else memoryview(b"")
    pieces = [data[begin : begin + _HASHED_AT_ONCE] for begin in range(0, held.nbytes, _HASHED_AT_ONCE)]
    if len(pieces) > 1:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            digests = list(threads.map(_sha256, pieces))
    else:
        digests = [_sha256(piece) for piece in pieces]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


@cache
def _kernels_id() -> str:
    """Identifies the library of kernels and the instruction sets that it uses here."""
    loaded = kernels.load()
    assert loaded.library is not None, "the kernels pack"
    contents = hashlib.sha256(Path(loaded.library._name).read_bytes()).hexdigest()
    return f"{contents} {loaded.isa} {loaded.quantized_isa}"
