"""The connector `disk`: blocks as files in a folder, which survive a restart and which several engines may share.

    PATH/<namespace>/<first byte of the key>/<key>.kv        header (magic, version, key, length, checksum) and payload

One file per block: a block of a real model has about a megabyte, so a file costs little beside its contents, blocks are
deleted one by one without compaction, and engines share the folder without locks. A file is written under a temporary
name and renamed, so a file with its final name is complete unless the machine has crashed; the checksum tells. A file
that is truncated, corrupted, or of another format is deleted, and its tokens are computed.

The folder of another model has another namespace. All namespaces together have at most `size` bytes; the least recently
used files are deleted first, by the time of their last use (mtime). Files that other engines have added or deleted are
seen by scans: one in a thread at the start, then those of folders that have changed, every few seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mvllm.extension_api import ConfigError, get_logger
from mvllm.extension_api.kv_transfer import (
    BlockKey,
    HostBlock,
    HostKVCache,
    KVConnector,
    KVConnectorContext,
    KVRequest,
    StoreChange,
    TransferResult,
)

logger = get_logger("mvllm.kv_transfer.disk")

_MAGIC = b"mvllmKV\n"
_VERSION = 1
_HEADER = struct.Struct("<8sIH64sQII")
"""Magic, version, length of the key, key, bytes of the payload, CRC-32 of the payload, CRC-32 of the fields before."""

_SUFFIX, _TEMPORARY = ".kv", ".tmp"
_NUM_READERS = 4
_SCAN_SECONDS = 5.0
_FIRST_SCAN_SECONDS = 5.0
"""So long lookups wait for the first scan."""

_PAUSE_SECONDS = 10.0
"""After a write that has failed nothing is saved for so long."""

_OLD_TEMPORARY_SECONDS = 3600.0
_CLOSE_SECONDS = 30.0
_FREED_SHARE = 1 / 20
"""So much of the contents is deleted when the disk is full."""

_DELETED_SHARE = 1 / 50
"""So much of the limit is deleted when the contents reach it."""


class _Entry:
    """A file."""

    __slots__ = ("size", "used")

    def __init__(self, size: int, used: float) -> None:
        self.size = size
        self.used = used


class _FileIndex:
    """The files of a folder with all namespaces, by path relative to it. Thread-safe.

    Args:
        folder: The folder.
        limit: Most bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._changes: list[tuple[str, bool]] | None = None  # name, is it there now; None until they are asked for
        self._scanned: dict[str, int] = {}  # folder -> mtime_ns when it was last read

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def add(self, name: str, size: int, used: float) -> None:
        """Adds or replaces a file."""
        with self._lock:
            self._add(name, size, used)

    def touch(self, name: str) -> None:
        """A file was used now; other engines see it by its mtime."""
        now = time.time()
        with self._lock:
            if name in self._entries:
                self._entries[name].used = now
        with contextlib.suppress(OSError):
            os.utime(self.folder / name, (now, now))

    def remove(self, name: str) -> None:
        """Deletes a file, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(self.folder / name)
        with self._lock:
            self._forget(name)

    def take_changes(self, *, everything: bool) -> list[tuple[str, bool]]:
        """The files that were added (True) or deleted since the last call, in their order.

        Args:
            everything: Return all files as added. Changes are recorded from the first such call on.
        """
        with self._lock:
            changes, self._changes = self._changes or [], []
            return [(name, True) for name in self._entries] if everything else changes

    def make_room(self, size: int) -> None:
        """Deletes the least recently used files if `size` more bytes are above the limit: some at once, as they are
        sorted by use each time."""
        above = self.num_bytes + size - self.limit
        if above > 0:
            self._delete_oldest(max(above, int(self.limit * _DELETED_SHARE)))

    def free_some(self, size: int) -> None:
        """Deletes some of the least recently used files, at least `size` bytes: the disk is full."""
        self._delete_oldest(max(size, int(self.num_bytes * _FREED_SHARE)))

    def scan(self, is_closed: Callable[[], bool] = lambda: False) -> None:
        """Reads the folders that have changed since they were last read. Deletes old temporary files."""
        for namespace in _subfolders(self.folder):
            for part in _subfolders(namespace):
                if is_closed():
                    return
                self._scan_folder(part)

    def _scan_folder(self, folder: str) -> None:
        found: dict[str, tuple[int, float]] = {}
        prefix = os.path.relpath(folder, self.folder) + "/"
        try:
            changed = os.stat(folder).st_mtime_ns
            if self._scanned.get(folder) == changed:
                return
            with os.scandir(folder) as files:
                for file in files:
                    status = file.stat()
                    if file.name.endswith(_SUFFIX):
                        found[prefix + file.name] = status.st_size, status.st_mtime
                    elif time.time() - status.st_mtime > _OLD_TEMPORARY_SECONDS:
                        os.unlink(file.path)
        except OSError:
            return  # the folder, or a file in it, has just been deleted: the next scan reads it again
        with self._lock:
            for name, (size, used) in found.items():
                if name not in self._entries:
                    self._add(name, size, used)
            for name in [name for name in self._entries if name.startswith(prefix) and name not in found]:
                if not os.path.exists(self.folder / name):  # it may have been written meanwhile
                    self._forget(name)
        if time.time_ns() - changed > 1_000_000_000:  # within one tick of the clock it may change again
            self._scanned[folder] = changed

    def _delete_oldest(self, size: int) -> None:
        if size <= 0:
            return
        with self._lock:
            names, freed = [], 0
            for name, entry in sorted(self._entries.items(), key=lambda item: item[1].used):
                if freed >= size:
                    break
                names.append(name)
                freed += entry.size
        for name in names:
            self.remove(name)

    def _add(self, name: str, size: int, used: float) -> None:
        before = self._entries.get(name)
        self._entries[name] = _Entry(size, used)
        self.num_bytes += size - (0 if before is None else before.size)
        if before is None and self._changes is not None:
            self._changes.append((name, True))

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.num_bytes -= entry.size
            if self._changes is not None:
                self._changes.append((name, False))


class DiskConnector(KVConnector):
    """Stores blocks as files.

    Options:
        path: The folder; made if it does not exist.
        size: Most bytes of all files in it, of all models; by default a quarter of the file system's free space.
    """

    medium = "disk"

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        folder, limit = _read_options(context.options)
        self._namespace = context.namespace.hex()[:32]
        try:
            os.makedirs(folder / self._namespace, mode=0o700, exist_ok=True)
            if limit is None:
                limit = shutil.disk_usage(folder).free // 4
            if not os.access(folder / self._namespace, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not readable and writable")
        except OSError as e:
            raise ConfigError(
                f"The folder {folder} of the KV cache on disk cannot be used: {e.strerror or e}. Choose another "
                "(kv_disk_cache), or make it writable."
            ) from e
        self._index = _FileIndex(folder, limit)
        self._reads: SimpleQueue[HostBlock | None] = SimpleQueue()
        self._writes: deque[HostBlock] = deque()
        self._written: HostBlock | None = None  # the write in progress; None once its contents are discarded
        self._has_writes = threading.Condition()
        self._results: deque[TransferResult] = deque()
        self._has_results = threading.Event()
        self._is_scanned = threading.Event()
        self._started = time.monotonic()
        self._paused_until = 0.0
        self._has_warned = False
        self._closed = threading.Event()
        self._num_temporary = 0
        self._threads = [
            threading.Thread(target=target, name=f"mvllm-kv-disk-{name}", daemon=True)
            for name, target in (
                ("scan", self._scan),
                ("write", self._write_all),
                *((f"read-{i}", self._read_all) for i in range(_NUM_READERS)),
            )
        ]
        for thread in self._threads:
            thread.start()

    def lookup(self, request: KVRequest, keys: Sequence[BlockKey]) -> Sequence[bool] | None:
        """Which keys have files. None while the folder is read for the first time, at most a few seconds."""
        if not self._is_scanned.is_set() and time.monotonic() - self._started < _FIRST_SCAN_SECONDS:
            return None
        return [self._name(key) in self._index for key in keys]

    def start_load(self, request: KVRequest, blocks: Sequence[HostBlock]) -> None:
        """Reads files on threads."""
        for block in blocks:
            self._reads.put(block)

    def start_save(self, blocks: Sequence[HostBlock]) -> None:
        """Writes files on a thread. What has a file already is not written."""
        is_paused = time.monotonic() < self._paused_until
        for block in blocks:
            if self._closed.is_set() or is_paused:
                self._report(block, is_load=False, ok=False)
            elif (name := self._name(block.key)) in self._index:
                self._index.touch(name)
                self._report(block, is_load=False, ok=True)
            else:
                with self._has_writes:
                    self._writes.append(block)
                    self._has_writes.notify()

    def poll(self) -> list[TransferResult]:
        """The transfers that have ended."""
        self._has_results.clear()
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def wait(self, timeout: float) -> None:
        """Waits for the end of a transfer, or of the first scan."""
        self._has_results.wait(timeout)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Deletes files, also those that are still to be written."""
        discarded = set(keys)
        with self._has_writes:
            dropped = [block for block in self._writes if block.key in discarded]
            if dropped:
                self._writes = deque(block for block in self._writes if block.key not in discarded)
            if self._written is not None and self._written.key in discarded:
                self._written = None
            for key in keys:
                if (name := self._name(key)) in self._index:
                    self._index.remove(name)
        for block in dropped:
            self._report(block, is_load=False, ok=False)

    def take_changes(self, *, everything: bool = False) -> Sequence[StoreChange]:
        """The files of this namespace that were added or deleted, by this engine or by others."""
        prefix, changes = self._namespace + "/", self._index.take_changes(everything=everything)
        own = [(bytes.fromhex(Path(name).stem), is_there) for name, is_there in changes if name.startswith(prefix)]
        return [
            StoreChange([key for key, _ in group], is_there)
            for is_there, group in groupby(own, key=lambda each: each[1])
        ]

    def stats(self) -> Mapping[str, float]:
        """Bytes of all files, and the limit."""
        return {"bytes_used": self._index.num_bytes, "bytes_limit": self._index.limit}

    def close(self) -> None:
        """Writes what has been given to `start_save`, then ends the threads."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._has_writes:
            self._has_writes.notify()
        for _ in range(_NUM_READERS):
            self._reads.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # --------------------------------------------------------------------------------------------------- in threads

    def _scan(self) -> None:
        while True:
            try:
                self._index.scan(self._closed.is_set)
            except Exception:
                logger.exception("The folder %s of the KV cache on disk cannot be read.", self._index.folder)
            self._is_scanned.set()
            self._has_results.set()
            if self._closed.wait(_SCAN_SECONDS):
                return

    def _read_all(self) -> None:
        while (block := self._reads.get()) is not None:
            ok = False
            try:
                ok = self._read(block)
            except Exception:
                logger.exception("A block of the KV cache on disk cannot be read.")
            self._report(block, is_load=True, ok=ok)

    def _read(self, block: HostBlock) -> bool:
        """Reads a file into its host block. Deletes a file that is not what it should be."""
        name = self._name(block.key)
        payload = self._host(block).block(block.index)
        header = bytearray(_HEADER.size)
        try:
            with open(self._index.folder / name, "rb", buffering=0) as file:
                is_whole = os.fstat(file.fileno()).st_size == _HEADER.size + payload.nbytes
                if is_whole:
                    is_whole = _read_exactly(file.fileno(), [memoryview(header), payload.data])
        except OSError:
            self._index.remove(name)
            return False
        if not is_whole or not _is_valid(header, block.key, payload):
            logger.warning("Deleted %s, a damaged file of the KV cache on disk.", self._index.folder / name)
            self._index.remove(name)
            return False
        self._index.touch(name)
        return True

    def _write_all(self) -> None:
        while True:
            with self._has_writes:
                while not self._writes:
                    if self._closed.is_set():
                        return
                    self._has_writes.wait()
                block = self._written = self._writes.popleft()
            ok = False
            try:
                ok = self._write(block)
            except Exception:
                logger.exception("A block cannot be written to the KV cache on disk.")
            self._report(block, is_load=False, ok=ok)

    def _write(self, block: HostBlock) -> bool:
        """Writes a host block, if files may be written now."""
        if time.monotonic() < self._paused_until:
            return False
        name = self._name(block.key)
        size = _HEADER.size + self._host(block).block_bytes
        if size > self._index.limit:
            self._warn(f"A block has {size:,} bytes, more than the limit of {self._index.limit:,}")
            return False
        self._index.make_room(size)
        try:
            if not self._write_file(name, block, size):
                return False
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                self._index.free_some(size)
            self._warn(f"Writing to {self._index.folder} failed: {e.strerror or e}")
            return False
        return True

    def _write_file(self, name: str, block: HostBlock, size: int) -> bool:
        """Writes the file of a block. False, without a file, if its contents are discarded meanwhile."""
        final = self._index.folder / name
        self._num_temporary += 1
        temporary = final.with_name(f"{os.getpid()}-{self.context.engine_id}-{self._num_temporary}{_TEMPORARY}")
        payload = self._host(block).block(block.index)
        header = _make_header(block.key, payload)
        try:
            os.makedirs(final.parent, mode=0o700, exist_ok=True)
            with open(temporary, "wb", buffering=0) as file:
                _write_exactly(file.fileno(), [memoryview(header), payload.data])
            with self._has_writes:
                if self._written is not None:
                    os.replace(temporary, final)
                    self._index.add(name, size, time.time())
                    return True
            os.unlink(temporary)
            return False
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _warn(self, what: str) -> None:
        """Stops saving for a while; says so once."""
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s. Blocks are not saved to disk for %g seconds; the oldest are deleted if the disk is full. Later "
                "failures are not logged.",
                what,
                _PAUSE_SECONDS,
            )

    def _report(self, block: HostBlock, *, is_load: bool, ok: bool) -> None:
        self._results.append(TransferResult(block, is_load, ok))
        self._has_results.set()

    def _name(self, key: BlockKey) -> str:
        text = key.hex()
        return f"{self._namespace}/{text[:2]}/{text}{_SUFFIX}"

    def _host(self, block: HostBlock) -> HostKVCache:
        if not block.is_state:
            return self.context.blocks
        assert self.context.states is not None
        return self.context.states


def _read_options(options: Mapping[str, Any]) -> tuple[Path, int | None]:
    """The folder and the limit in bytes."""
    unknown = set(options) - {"path", "size"}
    path, size = options.get("path"), options.get("size")
    if unknown or not isinstance(path, str) or not path:
        raise ConfigError(
            "The KV connector 'disk' takes the options 'path' (a folder) and 'size' (bytes), and needs 'path'; found "
            f"{dict(options)!r}."
        )
    if size is not None and (isinstance(size, bool) or not isinstance(size, int | float) or size <= 0):
        raise ConfigError(f"The option 'size' of the KV connector 'disk' must be a number of bytes, not {size!r}.")
    return Path(path).expanduser().absolute(), None if size is None else int(size)


def _subfolders(folder: str | Path) -> list[str]:
    """The folders in a folder; none if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _make_header(key: BlockKey, payload: Any) -> bytes:
    fields = _HEADER.pack(_MAGIC, _VERSION, len(key), key, payload.nbytes, zlib.crc32(payload), 0)[:-4]
    return fields + struct.pack("<I", zlib.crc32(fields))


def _is_valid(header: bytes | bytearray, key: BlockKey, payload: Any) -> bool:
    """Whether a file's header is that of this key and payload."""
    return bytes(header) == _make_header(key, payload)


def _read_exactly(fd: int, buffers: list[memoryview]) -> bool:
    """Fills the buffers from a file; False if it is too short."""
    offset = 0
    for buffer in buffers:
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset)
            if not count:
                return False
            done += count
            offset += count
    return True


def _write_exactly(fd: int, buffers: list[memoryview]) -> None:
    for buffer in buffers:
        done = 0
        while done < len(buffer):
            done += os.write(fd, buffer[done:])
