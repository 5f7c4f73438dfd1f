"""Example KV connector: blocks of keys and values in an SQLite file.

    engine core ── start_load, start_save ──> queue ──> thread ──> SQLite file
                <── poll ── results <────────────────────┘

The core's thread never waits for the file: it asks a set of keys in memory. The thread works off transfers one by one.

mvllm serve MODEL --kv-transfer-config '{"kv_connector": "sqlite", "kv_role": "both",
    "kv_connector_extra_config": {"path": "blocks.sqlite"}}'
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from mvllm.extension_api import ConfigError, get_logger
from mvllm.extension_api.kv_transfer import (
    HostBlock,
    HostKVCache,
    KVConnector,
    KVConnectorContext,
    KVRequest,
    StoreChange,
    TransferResult,
)

logger = get_logger("mvllm.example_kv_connector")

_DEFAULT_SIZE = 10**9
_CLOSE_SECONDS = 30.0
_TABLE = """
    CREATE TABLE IF NOT EXISTS blocks (
        namespace BLOB, key BLOB, used REAL, checksum INTEGER, content BLOB, PRIMARY KEY (namespace, key)
    )
"""


@dataclass(frozen=True)
class _Transfer:
    block: HostBlock
    is_load: bool


class SQLiteConnector(KVConnector):
    """Stores blocks as rows of a table.

    Options:
        path: The file; made if it does not exist.
        size: Most bytes of all blocks; the least recently used ones are deleted first.
    """

    medium = "sqlite"

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        options = dict(context.options)
        path, self._limit = options.pop("path", None), options.pop("size", _DEFAULT_SIZE)
        if not isinstance(path, str) or not isinstance(self._limit, int) or self._limit <= 0 or options:
            raise ConfigError(
                "The KV connector 'sqlite' takes the options 'path' (a file) and 'size' (bytes), and needs 'path'; "
                f"found {dict(context.options)!r}."
            )
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute(
                "PRAGMA journal_mode = WAL"
            )  # a crash leaves the last rows, or not, but no half ones
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(_TABLE)
            rows = self._database.execute("SELECT key FROM blocks WHERE namespace = ?", (context.namespace,))
            self._keys = {key for (key,) in rows}
            [(total,)] = self._database.execute("SELECT coalesce(sum(length(content)), 0) FROM blocks")
        except sqlite3.Error as e:
            raise ConfigError(
                f"The SQLite file {path} of the KV cache cannot be used: {e}. Choose another path."
            ) from e
        self._num_bytes: int = total
        self._lock = threading.Lock()  # of the keys and their changes
        self._changes: list[StoreChange] = []
        self._records_changes = False
        self._transfers: SimpleQueue[_Transfer | Sequence[bytes] | None] = SimpleQueue()
        self._results: deque[TransferResult] = deque()
        self._has_results = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mvllm-kv-sqlite", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------- called by the engine core: never waits

    def lookup(self, request: KVRequest, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which keys have rows."""
        with self._lock:
            return [key in self._keys for key in keys]

    def start_load(self, request: KVRequest, blocks: Sequence[HostBlock]) -> None:
        """Reads rows on the thread."""
        for block in blocks:
            self._transfers.put(_Transfer(block, is_load=True))

    def start_save(self, blocks: Sequence[HostBlock]) -> None:
        """Writes rows on the thread."""
        for block in blocks:
            self._transfers.put(_Transfer(block, is_load=False))

    def poll(self) -> list[TransferResult]:
        """The transfers that have ended."""
        self._has_results.clear()  # first: a result that comes now is found below, or sets it again
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def wait(self, timeout: float) -> None:
        """Waits for the end of a transfer."""
        self._has_results.wait(timeout)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Deletes rows. They are not found from now on."""
        with self._lock:
            gone = [key for key in keys if key in self._keys]
            self._forget(gone)
        self._transfers.put(gone)

    def take_changes(self, *, everything: bool = False) -> Sequence[StoreChange]:
        """The keys that were added or deleted."""
        with self._lock:
            changes, self._changes = self._changes, []
            if everything:
                self._records_changes = True
                return [StoreChange(list(self._keys), is_stored=True)]
            return changes

    def stats(self) -> Mapping[str, float]:
        """Bytes of all blocks, and the limit."""
        return {"bytes_used": self._num_bytes, "bytes_limit": self._limit}

    def close(self) -> None:
        """Ends the thread, after what it has been given. Idempotent."""
        if self._thread.is_alive():
            self._transfers.put(None)
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._database.close()

    # ---------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while (work := self._transfers.get()) is not None:
            if not isinstance(work, _Transfer):
                with contextlib.suppress(sqlite3.Error):
                    self._delete(work)
                continue
            ok = False
            try:
                ok = self._load(work.block) if work.is_load else self._save(work.block)
            except Exception as e:  # noqa: BLE001  (a transfer that fails is reported, whatever the reason)
                logger.warning("The KV connector 'sqlite' cannot %s a block: %s", "load" if work.is_load else "save", e)
            self._results.append(TransferResult(work.block, work.is_load, ok))
            self._has_results.set()

    def _load(self, block: HostBlock) -> bool:
        name = self.context.namespace, block.key
        row = self._database.execute(
            "SELECT checksum, content FROM blocks WHERE namespace = ? AND key = ?", name
        ).fetchone()
        if row is None:
            return False
        checksum, content = row
        target = self._host(block).block(block.index)
        if len(content) != target.nbytes or zlib.crc32(content) != checksum:
            self._delete([block.key])
            return False
        target.data[:] = content
        self._database.execute("UPDATE blocks SET used = ? WHERE namespace = ? AND key = ?", (time.time(), *name))
        return True

    def _save(self, block: HostBlock) -> bool:
        with self._lock:
            if block.key in self._keys:
                return True
        content = self._host(block).block(block.index).data
        if content.nbytes > self._limit:
            return False
        self._make_room(content.nbytes)
        row = self.context.namespace, block.key, time.time(), zlib.crc32(content), content
        self._database.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)", row)
        self._num_bytes += content.nbytes
        with self._lock:
            self._keys.add(block.key)
            self._change([block.key], is_stored=True)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Deletes the least recently used blocks, of any namespace."""
        rows = self._database.execute("SELECT namespace, key, length(content) FROM blocks ORDER BY used")
        deleted = []
        for namespace, key, length in rows if self._num_bytes + num_bytes > self._limit else ():
            if self._num_bytes + num_bytes <= self._limit:
                break
            deleted.append((namespace, key))
            self._num_bytes -= length
        self._database.executemany("DELETE FROM blocks WHERE namespace = ? AND key = ?", deleted)
        with self._lock:
            self._forget([key for namespace, key in deleted if namespace == self.context.namespace])

    def _delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            name = self.context.namespace, key
            found = self._database.execute(
                "DELETE FROM blocks WHERE namespace = ? AND key = ? RETURNING length(content)", name
            ).fetchall()
            self._num_bytes -= sum(length for (length,) in found)
        with self._lock:
            self._forget([key for key in keys if key in self._keys])

    def _forget(self, keys: Sequence[bytes]) -> None:
        self._keys.difference_update(keys)
        self._change(keys, is_stored=False)

    def _change(self, keys: Sequence[bytes], *, is_stored: bool) -> None:
        if keys and self._records_changes:
            self._changes.append(StoreChange(list(keys), is_stored))

    def _host(self, block: HostBlock) -> HostKVCache:
        if not block.is_state:
            return self.context.blocks
        assert self.context.states is not None
        return self.context.states
