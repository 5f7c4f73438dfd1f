"""The SQLite database of responses and conversations: in memory, or a file that several API servers share.

    objects   one row per response or conversation; `running` while a response is being generated
    items     the items of conversations
    events    the events of background responses that were started with `stream`, many events a row
    totals    number and bytes of all objects, kept by triggers

An object belongs to the API key of its request. When there are too many, the least recently used objects of the key
that has most are evicted, so no key can evict those of a key that has less. Objects of keys that the server does not
have any more are evicted first, and those that nobody has used for long. A running response is never evicted: where
several keys share the store, those of one key take at most as much as they leave free.

Every method is one transaction. A file is in WAL mode: processes read while one writes, and a process that is killed
loses nothing that it had committed.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mvllm.extension_api import ConfigError

OVERHEAD_BYTES = 1 << 10
"""Bytes that count for an object beside its contents."""

_APPLICATION_ID = 0x6D764C4D
_VERSION = 1
_BUSY_SECONDS = 10.0
_RESPONSE, _CONVERSATION = 0, 1

_OWNER_INDEX = "CREATE INDEX IF NOT EXISTS objects_by_owner ON objects (running, owner, used, size)"
_SCHEMA = """
CREATE TABLE objects (
    id TEXT PRIMARY KEY, kind INTEGER NOT NULL, owner BLOB, body BLOB NOT NULL, context BLOB NOT NULL,
    cache_salt TEXT, running INTEGER NOT NULL, cancelled INTEGER NOT NULL DEFAULT 0,
    streamed INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL, used INTEGER NOT NULL
);
CREATE INDEX objects_by_use ON objects (running, used);
CREATE TABLE items (
    object TEXT NOT NULL REFERENCES objects (id) ON DELETE CASCADE, position INTEGER NOT NULL, id TEXT NOT NULL,
    data BLOB NOT NULL, PRIMARY KEY (object, position), UNIQUE (object, id)
);
CREATE TABLE events (
    object TEXT NOT NULL REFERENCES objects (id) ON DELETE CASCADE, first INTEGER NOT NULL, last INTEGER NOT NULL,
    is_final INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (object, first)
);
CREATE TABLE totals (num INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER added AFTER INSERT ON objects BEGIN
    UPDATE totals SET num = num + 1, bytes = bytes + NEW.size; END;
CREATE TRIGGER resized AFTER UPDATE OF size ON objects BEGIN
    UPDATE totals SET bytes = bytes + NEW.size - OLD.size; END;
CREATE TRIGGER removed AFTER DELETE ON objects BEGIN
    UPDATE totals SET num = num - 1, bytes = bytes - OLD.size; END;
"""


@dataclass(frozen=True)
class StoreLimits:
    """Limits of a store.

    Attributes:
        max_objects: Most responses and conversations; 0 for none.
        max_bytes: Most bytes of all of them.
        max_age: Seconds after its last use when an object is deleted; None for never.
        owners: Digests of the API keys of the server; with fewer than two, all objects count as those of one owner.
    """

    max_objects: int
    max_bytes: int
    max_age: float | None = None
    owners: frozenset[bytes | None] = frozenset()

    @property
    def is_shared(self) -> bool:
        """Whether several API keys share the store."""
        return len(self.owners) > 1


class StoreFullError(Exception):
    """An object is too large, or the running responses of its key leave no room."""


@dataclass(frozen=True)
class StoredResponse:
    """A response, as it is stored.

    Attributes:
        body: The response, as JSON.
        context: The items before its output, as a JSON list: earlier turns and its input. Without the instructions,
            which apply to one turn.
        cache_salt: The request's: separates the conversation's cached blocks from those of others.
        owner: Digest of the request's API key; None for none.
        is_running: Whether it is being generated.
        is_streamed: Whether its events are stored.
    """

    body: bytes
    context: bytes = b"[]"
    cache_salt: str | None = None
    owner: bytes | None = None
    is_running: bool = False
    is_streamed: bool = False

    @property
    def size(self) -> int:
        """Bytes that it counts."""
        return len(self.body) + len(self.context) + OVERHEAD_BYTES


@dataclass(frozen=True)
class StoredConversation:
    """A conversation without its items."""

    body: bytes
    owner: bytes | None


@dataclass(frozen=True)
class EventBatch:
    """Events of one response that follow each other.

    Attributes:
        first, last: Sequence numbers of the first and the last event.
        data: The events as they are sent.
        is_final: Whether the last event ends the stream.
    """

    response_id: str
    first: int
    last: int
    data: bytes
    is_final: bool


class ResponseDatabase:
    """The database. Used from one thread at a time.

    Args:
        path: The file; None for a database in memory.

    Raises:
        ConfigError: The file cannot be used, or is no such database.
    """

    def __init__(self, path: str | None, limits: StoreLimits) -> None:
        self._limits = limits
        try:
            if path is not None:
                _create_file(path)
            self._connection = sqlite3.connect(
                path or ":memory:", timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._create_tables(path)
        except (OSError, sqlite3.Error) as e:
            raise ConfigError(
                f"The store of responses {path!r} cannot be used: {e}. Name a file that this server may create and "
                "write (--responses-store)."
            ) from e

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    def _create_tables(self, path: str | None) -> None:
        with self._transaction():
            found, version = self._one("PRAGMA application_id"), self._one("PRAGMA user_version")
            if found == 0 and version == 0 and self._one("SELECT COUNT(*) FROM sqlite_master") == 0:
                for statement in _statements(_SCHEMA):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                self._connection.execute(f"PRAGMA user_version = {_VERSION}")
            elif found != _APPLICATION_ID or version != _VERSION:
                raise ConfigError(
                    f"The store of responses {path!r} is a database of another program or version. Name another file "
                    "(--responses-store)."
                )
            self._connection.execute(_OWNER_INDEX)  # a file of an earlier release has none

    # --- responses

    def add_response(self, response_id: str, response: StoredResponse) -> None:
        """Stores a response.

        Raises:
            StoreFullError: It is too large, or running responses leave no room.
        """
        self._check_size(response.size)
        with self._transaction():
            if response.is_running and not self._has_room_to_run(response):
                raise StoreFullError
            self._connection.execute(
                "INSERT INTO objects (id, kind, owner, body, context, cache_salt, running, streamed, size, used) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(response_id, _RESPONSE, response.owner, response.body, response.context, response.cache_salt),
                    *(response.is_running, response.is_streamed, response.size, _now()),
                ),
            )
            self._evict(keep=response_id)

    def update_response(self, response_id: str, body: bytes) -> None:
        """Replaces the body of a running response. No effect if there is none."""
        with self._transaction():
            self._set_body(response_id, body, running=True)

    def finish_response(
        self,
        response_id: str,
        body: bytes,
        conversation_id: str | None = None,
        items: Sequence[tuple[str, bytes]] = (),
    ) -> None:
        """Stores the end of a running response, and adds items to a conversation.

        Args:
            response_id: No effect on responses if none has the id.
            conversation_id: No effect if none has the id: it was deleted while the response was generated.
            items: Ids and contents.

        Raises:
            StoreFullError: The response is too large, and has been deleted. The items are added.
        """
        is_too_large = False
        with self._transaction():
            if conversation_id is not None and self._has(conversation_id, _CONVERSATION):
                self._add_items(conversation_id, items)
            self._set_body(response_id, body, running=False)
            size = self._one("SELECT size FROM objects WHERE id = ?", response_id)
            if size is not None and size > self._limits.max_bytes:
                self._delete(response_id)
                is_too_large = True
            try:
                self._evict(keep=response_id)
            except StoreFullError:
                self._delete(response_id)
                is_too_large = True
        if is_too_large:
            raise StoreFullError

    def response(self, response_id: str) -> StoredResponse | None:
        """A response, which counts as used; None if there is none."""
        with self._transaction():
            row = self._use(response_id, _RESPONSE, "body, context, cache_salt, owner, running, streamed")
        if row is None:
            return None
        body, context, cache_salt, owner, running, streamed = row
        return StoredResponse(body, context, cache_salt, owner, bool(running), bool(streamed))

    def delete(self, object_id: str) -> None:
        """Deletes a response or a conversation. Idempotent."""
        with self._transaction():
            self._delete(object_id)

    def request_cancellation(self, response_id: str) -> None:
        """Marks a running response, for the process that generates it."""
        with self._transaction():
            self._connection.execute("UPDATE objects SET cancelled = 1 WHERE id = ? AND running", (response_id,))

    def cancellations(self) -> list[str]:
        """The running responses that are marked."""
        return [each for (each,) in self._connection.execute("SELECT id FROM objects WHERE running = 1 AND cancelled")]

    def fail_interrupted(self, message: str, models: Collection[str] | None = None) -> int:
        """Ends running responses with the status `failed`: to be called when no process generates them.

        Args:
            models: The names of the model whose responses end; None for all responses.

        Returns:
            Their number.
        """
        with self._transaction():
            rows = self._connection.execute("SELECT id, body, streamed FROM objects WHERE running = 1").fetchall()
            if models is not None:
                rows = [row for row in rows if msgspec.json.decode(row[1]).get("model") in models]
            for response_id, body, streamed in rows:
                failed = _as_failed(body, message)
                self._set_body(response_id, failed, running=False)
                if streamed:
                    last = self._one("SELECT MAX(last) FROM events WHERE object = ?", response_id)
                    number = 0 if last is None else last + 1
                    text = b'event: response.failed\ndata: {"type":"response.failed","sequence_number":%d,"response":'
                    self._add_events([EventBatch(response_id, number, number, text % number + failed + b"}\n\n", True)])
        return len(rows)

    # --- events

    def add_events(self, batches: Iterable[EventBatch]) -> None:
        """Stores events of running responses. A response whose events are too many keeps none of them."""
        with self._transaction():
            self._add_events(batches)

    def events(self, response_id: str, after: int) -> list[EventBatch] | None:
        """The stored events of a response in batches, from the batch with the event after number `after`.

        Returns:
            None if the response does not exist, or its events are not stored.
        """
        with self._transaction(write=False):
            if not self._one("SELECT streamed FROM objects WHERE id = ?", response_id):
                return None
            rows = self._connection.execute(
                "SELECT first, last, data, is_final FROM events WHERE object = ? AND last > ? ORDER BY first",
                (response_id, after),
            )
            return [EventBatch(response_id, first, last, data, bool(final)) for first, last, data, final in rows]

    # --- conversations

    def add_conversation(
        self, conversation_id: str, body: bytes, owner: bytes | None, items: Sequence[tuple[str, bytes]]
    ) -> None:
        """Stores a conversation.

        Raises:
            StoreFullError: It is too large.
        """
        self._check_size(len(body) + sum(len(data) for _, data in items) + OVERHEAD_BYTES)
        with self._transaction():
            self._connection.execute(
                "INSERT INTO objects (id, kind, owner, body, context, running, size, used) "
                "VALUES (?, ?, ?, ?, '', 0, ?, ?)",
                (conversation_id, _CONVERSATION, owner, body, len(body) + OVERHEAD_BYTES, _now()),
            )
            self._add_items(conversation_id, items)
            self._evict(keep=conversation_id)

    def conversation(self, conversation_id: str) -> StoredConversation | None:
        """A conversation, which counts as used; None if there is none."""
        with self._transaction():
            row = self._use(conversation_id, _CONVERSATION, "body, owner")
        return None if row is None else StoredConversation(*row)

    def conversations(
        self, prefix: str, owner: bytes | None, *, of_all_owners: bool, descending: bool
    ) -> Iterator[tuple[str, bytes]]:
        """Id and body of the conversations of `owner`, or `of_all_owners`, whose ids begin with `prefix`, by the time
        when they were added. Read one by one: all of them may be large."""
        order = "DESC" if descending else "ASC"
        yield from self._connection.execute(
            "SELECT id, body FROM objects WHERE kind = ? AND used >= ? AND SUBSTR(id, 1, ?) = ? "  # noqa: S608
            f"AND (? OR owner IS ?) ORDER BY rowid {order}",
            (_CONVERSATION, self._oldest_use(), len(prefix), prefix, of_all_owners, owner),
        )

    def update_conversation(self, conversation_id: str, body: bytes) -> None:
        """Replaces the body of a conversation. No effect if there is none."""
        with self._transaction():
            self._set_body(conversation_id, body, running=False)

    def add_items(self, conversation_id: str, items: Sequence[tuple[str, bytes]]) -> None:
        """Adds items to the end of a conversation. No effect if there is none.

        Args:
            items: Ids and contents. One that the conversation has already is not added.

        Raises:
            StoreFullError: The conversation would be too large.
        """
        with self._transaction():
            size = self._one("SELECT size FROM objects WHERE id = ?", conversation_id)
            if size is not None:
                self._check_size(size + sum(len(data) for _, data in items))
                self._add_items(conversation_id, items)
                self._evict(keep=conversation_id)

    def items(self, conversation_id: str, after: str | None, limit: int, *, descending: bool) -> list[bytes] | None:
        """Items of a conversation in their order, or from the last one on.

        Args:
            after: Id of the item before the first.
            limit: Most items; -1 for all.

        Returns:
            None if `after` is not an item of the conversation.
        """
        with self._transaction(write=False):
            compare, order = ("<", "DESC") if descending else (">", "ASC")
            parameters: list[Any] = [conversation_id]
            if after is not None:
                position = self._one("SELECT position FROM items WHERE object = ? AND id = ?", conversation_id, after)
                if position is None:
                    return None
                parameters.append(position)
            bound = "" if after is None else f"AND position {compare} ?"
            rows = self._connection.execute(
                f"SELECT data FROM items WHERE object = ? {bound} ORDER BY position {order} LIMIT ?",  # noqa: S608
                (*parameters, limit),
            )
            return [data for (data,) in rows]

    def item(self, conversation_id: str, item_id: str) -> bytes | None:
        """One item; None if there is none."""
        found: bytes | None = self._one("SELECT data FROM items WHERE object = ? AND id = ?", conversation_id, item_id)
        return found

    def delete_item(self, conversation_id: str, item_id: str) -> bool:
        """Deletes an item; returns whether there was one."""
        with self._transaction():
            data = self.item(conversation_id, item_id)
            if data is None:
                return False
            self._connection.execute("DELETE FROM items WHERE object = ? AND id = ?", (conversation_id, item_id))
            self._add_size(conversation_id, -len(data))
            return True

    # --- all objects

    def totals(self) -> tuple[int, int]:
        """Number and bytes of all objects."""
        num, num_bytes = self._connection.execute("SELECT num, bytes FROM totals").fetchone()
        return num, num_bytes

    def _use(self, object_id: str, kind: int, columns: str) -> tuple[Any, ...] | None:
        """Columns of an object, which counts as used; None if there is none, or it is too old."""
        row: tuple[Any, ...] | None = self._connection.execute(
            f"SELECT {columns} FROM objects WHERE id = ? AND kind = ? AND (running OR used >= ?)",  # noqa: S608
            (object_id, kind, self._oldest_use()),
        ).fetchone()
        if row is not None:
            self._connection.execute("UPDATE objects SET used = ? WHERE id = ?", (_now(), object_id))
        return row

    def _has(self, object_id: str, kind: int) -> bool:
        return self._one("SELECT COUNT(*) FROM objects WHERE id = ? AND kind = ?", object_id, kind) > 0

    def _set_body(self, object_id: str, body: bytes, *, running: bool) -> None:
        self._connection.execute(
            "UPDATE objects SET size = size + ? - LENGTH(body), body = ?, running = ?, used = ? "
            "WHERE id = ? AND running >= ?",
            (len(body), body, running, _now(), object_id, running),
        )

    def _add_size(self, object_id: str, num_bytes: int) -> None:
        self._connection.execute("UPDATE objects SET size = size + ? WHERE id = ?", (num_bytes, object_id))

    def _add_items(self, conversation_id: str, items: Iterable[tuple[str, bytes]]) -> None:
        last = self._one("SELECT MAX(position) FROM items WHERE object = ?", conversation_id)
        position = 0 if last is None else last
        for item_id, data in items:
            position += 1
            added = self._connection.execute(
                "INSERT OR IGNORE INTO items VALUES (?, ?, ?, ?)", (conversation_id, position, item_id, data)
            )
            self._add_size(conversation_id, len(data) * added.rowcount)
        self._connection.execute("UPDATE objects SET used = ? WHERE id = ?", (_now(), conversation_id))

    def _add_events(self, batches: Iterable[EventBatch]) -> None:
        running = self._running_bytes()
        for batch in batches:
            row = self._connection.execute(
                "SELECT size, owner FROM objects WHERE id = ? AND streamed", (batch.response_id,)
            ).fetchone()
            if row is None:
                continue
            size, owner = row
            own, others = max(size, running.get(owner, 0)), sum(running.values()) - running.get(owner, 0)
            if own + len(batch.data) > self._most(self._limits.max_bytes, own, others):
                num_bytes = self._one("SELECT SUM(LENGTH(data)) FROM events WHERE object = ?", batch.response_id)
                self._connection.execute("DELETE FROM events WHERE object = ?", (batch.response_id,))
                self._connection.execute("UPDATE objects SET streamed = 0 WHERE id = ?", (batch.response_id,))
                self._add_size(batch.response_id, -(num_bytes or 0))
                continue
            self._connection.execute(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
                (batch.response_id, batch.first, batch.last, batch.is_final, batch.data),
            )
            self._add_size(batch.response_id, len(batch.data))
            running[owner] = running.get(owner, 0) + len(batch.data)

    def _delete(self, object_id: str) -> None:
        self._connection.execute("DELETE FROM objects WHERE id = ?", (object_id,))

    def _check_size(self, size: int) -> None:
        if self._limits.max_objects == 0 or size > self._limits.max_bytes:
            raise StoreFullError

    def _has_room_to_run(self, response: StoredResponse) -> bool:
        """Whether the limits of running responses allow one more, see the module."""
        total = self._one("SELECT COUNT(*) FROM objects WHERE running = 1")
        own = self._one("SELECT COUNT(*) FROM objects WHERE running = 1 AND owner IS ?", response.owner)
        running = self._running_bytes()
        own_bytes = running.get(response.owner, 0)
        num_fits = own < self._most(self._limits.max_objects, own, total - own)
        most = self._most(self._limits.max_bytes, own_bytes, sum(running.values()) - own_bytes)
        return num_fits and own_bytes + response.size <= most

    def _most(self, limit: int, own: int, others: int) -> int:
        """How much of a limit the running responses of a key may take, where they and those of others take so much."""
        return limit - others - own if self._limits.is_shared else limit - others

    def _running_bytes(self) -> dict[bytes | None, int]:
        """Bytes of running responses by owner."""
        return dict(self._connection.execute("SELECT owner, SUM(size) FROM objects WHERE running = 1 GROUP BY owner"))

    def _evict(self, keep: str) -> None:
        """Deletes objects that are too old, and above the limits further ones except `keep`, see the module.

        Raises:
            StoreFullError: `keep` is of the owner that has most, and nothing else of it can be deleted.
        """
        self._connection.execute("DELETE FROM objects WHERE running = 0 AND used < ?", (self._oldest_use(),))
        while True:
            num, num_bytes = self.totals()
            if num <= self._limits.max_objects and num_bytes <= self._limits.max_bytes:
                return
            oldest = self._next_to_evict(keep, by_number=num > self._limits.max_objects)
            if oldest is None:
                return
            self._delete(oldest)

    def _next_to_evict(self, keep: str, *, by_number: bool) -> str | None:
        """The object to evict next; None if all others are running. Raises as `_evict`."""
        if not self._limits.is_shared:
            found: str | None = self._one(
                "SELECT id FROM objects WHERE running = 0 AND id != ? ORDER BY used LIMIT 1", keep
            )
            return found
        amount = "COUNT(*)" if by_number else "SUM(size)"
        rows = self._connection.execute(f"SELECT owner FROM objects GROUP BY owner ORDER BY {amount} DESC")  # noqa: S608
        for owner in sorted((owner for (owner,) in rows.fetchall()), key=self._limits.owners.__contains__):
            oldest: str | None = self._one(
                "SELECT id FROM objects WHERE running = 0 AND owner IS ? AND id != ? ORDER BY used LIMIT 1", owner, keep
            )
            if oldest is not None:
                return oldest
            if self._one("SELECT 1 FROM objects WHERE id = ? AND owner IS ?", keep, owner):
                raise StoreFullError
        return None

    def _oldest_use(self) -> int:
        age = self._limits.max_age
        return 0 if age is None else _now() - int(age * 1e9)

    def _one(self, query: str, *parameters: Any) -> Any:
        """The first column of the first row; None if there is none."""
        row = self._connection.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:  # SQLite ends it itself after some errors
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _create_file(path: str) -> None:
    """Creates the file if there is none, so that other users cannot read it; SQLite's files beside it follow.

    An existing file is not opened. SQLite's locks are POSIX locks: when any descriptor of a file is closed, the process
    loses the locks of all its connections to this file. Another process would then take itself for the last user, and
    delete the WAL with what these connections write.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _now() -> int:
    """Nanoseconds of the wall clock: the next process goes on with it."""
    return time.time_ns()


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, whose last line ends with a semicolon each."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _as_failed(body: bytes, message: str) -> bytes:
    """The body of a response that ended without an end."""
    response = msgspec.json.decode(body)
    response["status"] = "failed"
    response["error"] = {"code": "server_error", "message": message}
    for item in response["output"]:
        if item.get("status") == "in_progress":
            item["status"] = "incomplete"
    return msgspec.json.encode(response)
