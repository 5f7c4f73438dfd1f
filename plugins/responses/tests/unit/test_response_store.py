"""The store of responses: limits, owners, a file that processes share, and what a killed server leaves behind."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.server.authentication import Caller, Role
from mvllm.errors import ConfigError
from mvllm_responses import database as database_module
from mvllm_responses.database import (
    EventBatch,
    ResponseDatabase,
    StoredResponse,
    StoreFullError,
    StoreLimits,
)
from mvllm_responses.store import ResponseStore
from mvllm_responses.store_file import hold_store_file

LIMITS = StoreLimits(1000, 1 << 20)
OWNERS = frozenset({b"a", b"b", b"c", None})
CALLER, OTHER, BOSS = Caller(Role.USER, b"a key"), Caller(Role.USER, b"another"), Caller(Role.ADMIN, b"boss")


def body(status: str = "completed", **fields: Any) -> bytes:
    return json.dumps({"status": status, "background": True, "output": [], **fields}).encode()


def stored(text: bytes = b"{}", **fields: Any) -> StoredResponse:
    return StoredResponse(text, owner=CALLER.key, **fields)


def ids_in(database: ResponseDatabase, names: Iterable[str]) -> str:
    return "".join(name for name in names if database.response(name) is not None)


def test_the_least_recently_used_object_is_evicted_first_and_a_running_response_never() -> None:
    database = ResponseDatabase(None, StoreLimits(3, 1 << 20))
    database.add_response("r", stored(is_running=True))
    for name in "ab":
        database.add_response(name, stored())
    assert database.response("a") is not None  # used
    database.add_conversation("c", b"{}", None, [])
    assert ids_in(database, "rab") == "ra" and database.conversation("c") is not None
    assert database.totals()[0] == 3


def test_too_many_running_responses_are_refused() -> None:
    database = ResponseDatabase(None, StoreLimits(2, 1 << 20))
    for name in "ab":
        database.add_response(name, stored(is_running=True))
    with pytest.raises(StoreFullError):
        database.add_response("c", stored(is_running=True))


def test_stored_bytes_are_bounded_and_a_too_large_object_evicts_nothing() -> None:
    database = ResponseDatabase(None, StoreLimits(1000, 10_000))
    database.add_response("small", stored())
    with pytest.raises(StoreFullError):
        database.add_response("huge", stored(b"x" * 20_000))
    database.add_response("grown", stored(is_running=True))
    with pytest.raises(StoreFullError):
        database.finish_response("grown", b"x" * 20_000)
    assert database.totals()[0] == 1
    database.add_conversation("c", b"{}", None, [(str(i), b"x" * 100) for i in range(20)])
    with pytest.raises(StoreFullError):
        database.add_items("c", [("big", b"x" * 9000)])
    for i in range(50):
        database.add_response(str(i), stored(b"x" * 1000))
        assert database.totals()[1] <= 10_000
    assert database.conversation("c") is None
    for i in range(50):
        database.delete(str(i))
    assert database.totals() == (0, 0)


def conversations_of(database: ResponseDatabase, owner: str, count: int) -> int:
    return sum(database.conversation(f"{owner}{i}") is not None for i in range(count))


def test_a_key_that_stores_much_evicts_its_own_objects_and_not_those_of_others() -> None:
    database = ResponseDatabase(None, StoreLimits(10, 1 << 20, owners=OWNERS))
    for i in range(4):
        database.add_conversation(f"a{i}", b"{}", b"a", [])
    for i in range(100):
        database.add_conversation(f"b{i}", b"{}", b"b", [])
        database.add_response(f"r{i}", StoredResponse(b"{}", owner=b"b"))
    assert conversations_of(database, "a", 4) == 4 and database.totals()[0] == 10
    assert database.conversation("b99") is not None and database.response("r99") is not None
    database.add_conversation("c0", b"{}", None, [])  # who has nothing yet gets a share of the rest
    assert conversations_of(database, "a", 4) == 4 and database.conversation("c0") is not None
    for i in range(100):  # two of the same size share the store
        database.add_conversation(f"a{i}", b"{}", b"a", []) if i >= 4 else None
    assert conversations_of(database, "b", 100) + ids_in(database, [f"r{i}" for i in range(100)]).count("r") >= 4
    assert database.conversation("c0") is not None


def test_objects_of_keys_that_exist_no_more_are_evicted_first() -> None:
    database = ResponseDatabase(None, StoreLimits(6, 1 << 20, owners=OWNERS))
    for i in range(3):
        database.add_conversation(f"z{i}", b"{}", b"a removed key", [])
    for i in range(3):
        database.add_conversation(f"a{i}", b"{}", b"a", [])
    for i in range(3):
        database.add_conversation(f"b{i}", b"{}", b"b", [])
    assert [conversations_of(database, owner, 3) for owner in "zab"] == [0, 3, 3]


def test_the_bytes_of_a_key_evict_its_own_objects_only() -> None:
    database = ResponseDatabase(None, StoreLimits(1000, 20_000, owners=OWNERS))
    for i in range(4):
        database.add_conversation(f"a{i}", b"{}", b"a", [("1", b"x" * 500)])
    for i in range(30):
        database.add_conversation(f"b{i}", b"{}", b"b", [])
        database.add_items(f"b{i}", [("1", b"x" * 9000)])
        assert database.totals()[1] <= 20_000
    with pytest.raises(StoreFullError):  # it alone would be more than the others leave
        database.add_conversation("b30", b"{}", b"b", [("1", b"x" * 18_000)])
    with pytest.raises(StoreFullError):
        database.add_items("b29", [("2", b"x" * 9000)])
    database.add_response("b31", StoredResponse(b"{}", owner=b"b", is_running=True))
    with pytest.raises(StoreFullError):
        database.finish_response("b31", b"x" * 18_000)
    assert conversations_of(database, "a", 4) == 4


def test_running_responses_of_one_key_leave_room_for_those_of_others() -> None:
    database = ResponseDatabase(None, StoreLimits(16, 1 << 20, owners=OWNERS))
    running = {b"a": 0, b"b": 0, b"c": 0}
    for owner in running:
        with pytest.raises(StoreFullError):
            for i in range(17):
                database.add_response(f"{owner!r}{i}", StoredResponse(b"{}", owner=owner, is_running=True))
                running[owner] += 1
    assert running == {b"a": 8, b"b": 4, b"c": 2}


def test_running_responses_with_much_text_do_not_evict_what_others_have_stored() -> None:
    database = ResponseDatabase(None, StoreLimits(100, 100_000, owners=OWNERS))
    for i in range(10):
        database.add_conversation(f"a{i}", b"{}", b"a", [("1", b"x" * 1000)])
    with pytest.raises(StoreFullError):
        for i in range(100):
            big = StoredResponse(b"{}", b"x" * 9000, owner=b"b", is_running=True, is_streamed=True)
            database.add_response(f"b{i}", big)
            database.add_events([EventBatch(f"b{i}", 0, 1, b"x" * 40_000, False)])
    assert conversations_of(database, "a", 10) == 10 and database.totals()[1] <= 100_000


def test_an_object_that_nobody_has_used_for_long_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**18]
    monkeypatch.setattr(database_module, "_now", lambda: now[0])
    database = ResponseDatabase(None, StoreLimits(1000, 1 << 20, max_age=60))
    for name in "ab":
        database.add_response(name, stored())
    now[0] += 50 * 10**9
    assert database.response("a") is not None
    now[0] += 50 * 10**9
    assert ids_in(database, "ab") == "a"
    database.add_response("c", stored())
    assert database.totals()[0] == 2


def test_the_events_of_a_response_are_dropped_where_they_are_too_many() -> None:
    database = ResponseDatabase(None, StoreLimits(10, 10_000))
    database.add_response("a", stored(is_running=True, is_streamed=True))
    database.add_events([EventBatch("a", 0, 2, b"x" * 5000, False)])
    database.add_events([EventBatch("a", 3, 4, b"y" * 10, False)])
    assert [batch.first for batch in database.events("a", 2) or []] == [3]
    database.add_events([EventBatch("a", 5, 6, b"x" * 5000, True)])
    assert database.events("a", -1) is None and database.totals()[1] < 2000


def test_items_come_in_pages_in_both_orders_and_an_item_is_added_once() -> None:
    database = ResponseDatabase(None, LIMITS)
    database.add_conversation("c", b"{}", None, [(name, name.encode()) for name in "abc"])
    database.add_items("c", [("b", b"again"), ("d", b"d")])
    assert database.items("c", None, -1, descending=False) == [b"a", b"b", b"c", b"d"]
    assert database.items("c", "c", 2, descending=True) == [b"b", b"a"]
    assert database.items("c", "x", 2, descending=False) is None
    assert database.delete_item("c", "b") and not database.delete_item("c", "b")
    assert database.items("c", "a", 1, descending=False) == [b"c"]


def test_what_a_killed_server_left_running_has_failed_at_the_next_start(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    database = ResponseDatabase(path, LIMITS)
    message = {"type": "message", "status": "in_progress"}
    running = body("in_progress", output=[message])
    database.add_response("a", stored(running, is_running=True, is_streamed=True))
    database.add_events([EventBatch("a", 0, 3, b"...", False)])
    database.add_response("b", stored(body()))
    with hold_store_file(path, LIMITS):  # the first connection is still open, as that of a killed process
        again = ResponseDatabase(path, LIMITS)
        found = again.response("a")
        assert found is not None and not found.is_running
        failed = json.loads(found.body)
        assert failed["status"] == "failed" and "ended before" in failed["error"]["message"]
        assert failed["output"][0]["status"] == "incomplete"
        [last] = again.events("a", 3) or []
        assert last.is_final and last.first == 4 and last.data.startswith(b"event: response.failed\n")
        assert json.loads(last.data.split(b"data: ")[1])["response"] == failed
        kept = again.response("b")
        assert kept is not None and kept.body == body()


def test_a_second_connection_of_a_process_does_not_end_the_locks_of_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    first = ResponseDatabase(path, LIMITS)
    first.add_response("a", stored())
    ResponseDatabase(path, LIMITS).close()
    query = "SELECT COUNT(*) FROM objects"

    def count_in_another_process() -> int:
        program = f"import sqlite3; c = sqlite3.connect({path!r}); print(*c.execute({query!r}).fetchone()); c.close()"
        return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout)

    assert count_in_another_process() == 1  # as the last user of the file, it would delete the WAL when it closes
    first.add_response("b", stored())
    assert count_in_another_process() == 2
    first.close()


def test_a_file_belongs_to_one_server_and_its_user(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    with hold_store_file(str(path), LIMITS):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="Another server uses"), hold_store_file(str(path), LIMITS):
            pass
    with hold_store_file(str(path), LIMITS):
        pass


@pytest.mark.parametrize("kind", ["text", "foreign", "folder", "missing"])
def test_a_file_that_is_no_store_is_refused_and_unchanged(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "text":
        path.write_bytes(b"hello " * 1000)
    elif kind == "foreign":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE mine (x)")
        connection.close()
    elif kind == "folder":
        path.mkdir()
    else:
        path = tmp_path / "no" / "file"
    with pytest.raises(ConfigError, match="responses-store"), hold_store_file(str(path), LIMITS):
        pass
    if kind == "text":
        assert path.read_bytes() == b"hello " * 1000


class Running:
    """A running response that ends in the store when it is cancelled."""

    def __init__(self, store: ResponseStore, name: str) -> None:
        self.num_cancelled, self._store, self._name = 0, store, name
        self._tasks: list[Any] = []

    def snapshot(self) -> bytes:
        return body("in_progress")

    def cancel(self) -> None:
        self.num_cancelled += 1
        self._tasks.append(asyncio.create_task(self._store.finish(self._name, body("cancelled"))))

    async def ended(self) -> None:
        """Waits until the store has finished with it."""
        await asyncio.gather(*self._tasks)


def run_with_stores(paths: list[str | None], work: Callable[..., Awaitable[None]]) -> None:
    async def run() -> None:
        stores = [ResponseStore(path, LIMITS) for path in paths]
        try:
            await work(*stores)
        finally:
            for store in stores:
                await store.close()

    asyncio.run(run())


def test_a_response_that_another_process_generates_can_be_read_and_cancelled(tmp_path: Path) -> None:
    async def work(one: ResponseStore, other: ResponseStore) -> None:
        running = Running(one, "a")
        first = stored(body("queued"), is_running=True)
        assert await one.add_running("a", running, first, is_background=True)
        assert await one.body("a", CALLER) == body("in_progress") and await other.body("a", CALLER) == body("queued")
        with pytest.raises(APIError, match="still being generated"):
            await other.delete("a", CALLER)
        with pytest.raises(APIError, match="still being generated"):
            await other.previous("a", CALLER)
        answers = await asyncio.gather(*(other.cancel("a", CALLER) for _ in range(20)))
        assert set(answers) == {body("cancelled")} and running.num_cancelled == 1
        await running.ended()  # others see the stored response before its own process has finished with it
        assert await one.cancel("a", CALLER) == body("cancelled")  # again, which changes nothing

    run_with_stores([str(tmp_path / "db"), str(tmp_path / "db")], work)


def test_objects_do_not_exist_for_other_keys() -> None:
    async def work(store: ResponseStore) -> None:
        await store.add_running("r", Running(store, "r"), stored(body(), is_running=True), is_background=False)
        await store.add_conversation("c", b"{}", CALLER, [])
        for use in (store.body, store.response, store.cancel, store.delete, store.previous, store.conversation):
            for name in ("r", "c", "nothing", "a' OR '1'='1", 'x"; DROP TABLE objects; --', "\ud800", "\0", "x" * 9999):
                with pytest.raises(APIError) as raised:
                    await use(name, OTHER)
                assert raised.value.code in (
                    "response_not_found",
                    "previous_response_not_found",
                    "conversation_not_found",
                )
                assert "still" not in str(raised.value)
        for caller in (CALLER, BOSS):
            assert await store.body("r", caller) == body("in_progress")
            assert (await store.conversation("c", caller)).body == b"{}"

    run_with_stores([None], work)


def test_a_response_whose_client_has_left_is_discarded() -> None:
    async def work(store: ResponseStore) -> None:
        await store.add_running("a", Running(store, "a"), stored(is_running=True), is_background=False)
        store.discard("a")
        store.discard("a")
        assert await store.totals() == (0, 0)

    run_with_stores([None], work)


def test_a_store_that_cannot_be_written_does_not_lose_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def work(store: ResponseStore) -> None:
        await store.add_running("a", Running(store, "a"), stored(is_running=True), is_background=False)
        store._database._connection.execute("DROP TABLE objects")
        await store.finish("a", b"{}")
        assert "cannot be used" in caplog.text and not store.is_running("a")
        with pytest.raises(APIError) as raised:
            await store.body("a", CALLER)
        assert raised.value.status == 503

    run_with_stores([None], work)
