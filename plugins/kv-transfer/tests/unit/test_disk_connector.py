"""The connector `disk`: what is stored is found again, also by another engine; what is damaged is not."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mvllm.errors import ConfigError
from mvllm.extension_api.kv_transfer import (
    HostBlock,
    HostKVCache,
    KVConnectorContext,
    KVRequest,
    StoreChange,
    TransferResult,
)
from mvllm_kv_transfer import disk_connector
from mvllm_kv_transfer.disk_connector import _HEADER, DiskConnector

NUM_BYTES = 3000
REQUEST = KVRequest("r")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


class Store:
    """A connector with host blocks of two ranks."""

    def __init__(self, folder: Path, *, namespace: bytes = b"n" * 32, size: int | None = 10**9, engine: str = "e"):
        self.blocks = HostKVCache(8, [NUM_BYTES - 1000, 1000])
        self.states = HostKVCache(4, [500, 0])
        options = {"path": str(folder)} | ({} if size is None else {"size": size})
        self.connector = DiskConnector(KVConnectorContext(namespace, engine, "both", self.blocks, self.states, options))
        self.connector._is_scanned.wait(5)

    def save(self, *keys: bytes, is_state: bool = False) -> list[bool]:
        """Saves blocks with contents that follow from their keys."""
        host = self.states if is_state else self.blocks
        done = []
        for key in keys:
            host.block(0)[:] = contents(key, host.block_bytes)
            self.connector.start_save([HostBlock(key, 0, is_state)])
            done += self._results(1)
        return done

    def load(self, *keys: bytes, is_state: bool = False) -> list[bool]:
        """Loads blocks, and checks the contents of those that are there."""
        host = self.states if is_state else self.blocks
        done = []
        for key in keys:
            host.block(1)[:] = 0
            self.connector.start_load(REQUEST, [HostBlock(key, 1, is_state)])
            [ok] = self._results(1)
            assert not ok or bytes(host.block(1)) == bytes(contents(key, host.block_bytes))
            done.append(ok)
        return done

    def _results(self, count: int) -> list[bool]:
        found: list[bool] = []
        deadline = time.monotonic() + 120
        while len(found) < count:
            assert time.monotonic() < deadline, "a transfer does not end"
            self.connector.wait(0.1)
            found += [result.ok for result in self.connector.poll()]
        return found

    def has(self, *keys: bytes) -> list[bool]:
        found = self.connector.lookup(REQUEST, keys)
        assert found is not None
        return list(found)


@pytest.fixture
def open_store(folder):
    stores = []

    def make(**settings):
        stores.append(Store(folder, **settings))
        return stores[-1]

    yield make
    for store in stores:
        store.connector.close()


def contents(key: bytes, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(int.from_bytes(key[:4], "little")).integers(0, 256, num_bytes, np.uint8)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def key(number: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(28)


def test_blocks_and_states_are_found_again(open_store):
    store = open_store()
    assert store.save(key(1), key(2) + b"\x01\x00") == [True, True]
    assert store.save(key(1) + b"\xff\xff", is_state=True) == [True]
    assert store.has(key(1), key(3), key(2) + b"\x01\x00", key(2)) == [True, False, True, False]
    assert store.load(key(1), key(2) + b"\x01\x00", key(3)) == [True, True, False]
    assert store.load(key(1) + b"\xff\xff", is_state=True) == [True]


def test_they_are_found_after_a_restart_and_not_in_another_namespace(open_store):
    first = open_store()
    first.save(*map(key, range(5)))
    first.connector.close()
    assert open_store(engine="later").load(*map(key, range(6))) == [True] * 5 + [False]
    other = open_store(namespace=b"m" * 32)
    assert other.has(key(0)) == [False] and other.load(key(0)) == [False]


def test_close_writes_what_was_given_before(open_store, folder):
    store = open_store()
    for i in range(6):
        store.blocks.block(i)[:] = contents(key(i), NUM_BYTES)
    store.connector.start_save([HostBlock(key(i), i) for i in range(6)])
    store.connector.close()
    assert len(files(folder)) == 6 and not list(folder.rglob("*.tmp"))
    store.connector.start_save([HostBlock(key(7), 7)])  # too late: it ends, without a file
    assert not all(result.ok for result in store.connector.poll() if result.block.index == 7)


def test_discarded_contents_are_not_written_later(open_store, folder, monkeypatch):
    """Of three writes one is in progress, one waits and is discarded, one waits."""
    store = open_store()
    began, may_end = threading.Event(), threading.Event()
    write = disk_connector._write_exactly

    def slow_write(*args: Any) -> None:
        began.set()
        assert may_end.wait(120)
        write(*args)

    monkeypatch.setattr(disk_connector, "_write_exactly", slow_write)
    blocks = [HostBlock(key(i), i) for i in range(3)]
    for block in blocks:
        store.blocks.block(block.index)[:] = contents(block.key, NUM_BYTES)
    store.connector.start_save(blocks)
    assert began.wait(120)
    store.connector.discard([key(0), key(1), key(7)])
    assert store.connector.poll() == [TransferResult(blocks[1], is_load=False, ok=False)], "its host block is free"
    may_end.set()
    assert sorted(store._results(2)) == [False, True]
    assert store.has(*map(key, range(3))) == [False, False, True] == store.load(*map(key, range(3)))
    assert len(files(folder)) == 1 and not list(folder.rglob("*.tmp"))
    assert store.save(key(0)) == [True] and store.load(key(0)) == [True], "computed again, they are stored"


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_payload(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[_HEADER.size + 1234] ^= 4
    path.write_bytes(data)


def damage_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_name(path: Path) -> None:
    path.write_bytes(path.with_name(path.name).read_bytes().replace(key(1), key(2)))


@pytest.mark.parametrize("damage", [damage_truncate, damage_payload, damage_version, damage_empty, damage_name])
def test_a_damaged_file_is_deleted_and_not_loaded(open_store, folder, damage):
    store = open_store()
    store.save(key(1), key(9))
    [path] = [each for each in files(folder) if each.name.startswith(key(1).hex())]
    damage(path)
    assert store.load(key(1)) == [False]
    assert not path.exists() and store.has(key(1), key(9)) == [False, True]
    assert store.save(key(1)) == [True] and store.load(key(1)) == [True]


def test_a_file_that_another_engine_has_deleted_is_not_found(open_store, folder):
    store = open_store()
    store.save(key(1))
    files(folder)[0].unlink()
    assert store.load(key(1)) == [False] and store.has(key(1)) == [False]


def test_files_of_another_engine_are_seen_by_the_next_scan(open_store):
    one, other = open_store(engine="one"), open_store(engine="other")
    one.save(key(1))
    assert other.has(key(1)) == [False]
    other.connector._index.scan()
    assert other.has(key(1)) == [True] and other.load(key(1)) == [True]
    one.connector.discard([key(1)])
    other.connector._index._scanned.clear()
    other.connector._index.scan()
    assert other.has(key(1)) == [False] and other.connector.stats()["bytes_used"] == 0


def test_the_least_recently_used_files_of_all_models_are_deleted_first(open_store, folder):
    size = NUM_BYTES + _HEADER.size
    old = open_store(namespace=b"o" * 32)
    old.save(key(100))
    for path in files(folder):
        os.utime(path, (1, 1))
    old.connector.close()
    store = open_store(size=4 * size)
    for i in range(3):
        store.save(key(i))
        store.connector._index._entries[store.connector._name(key(i))].used = 10.0 + i
    assert len(files(folder)) == 4
    store.load(key(0))
    store.save(key(3), key(4))
    assert store.has(*map(key, range(5))) == [True, False, True, True, True]
    assert len(files(folder)) == 4 and store.connector.stats() == {"bytes_used": 4 * size, "bytes_limit": 4 * size}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_stops_saving_for_a_while_with_one_warning(open_store, folder, monkeypatch, caplog, number):
    store = open_store()
    store.save(*map(key, range(20)))
    write = os.write

    def fail(fd: int, data: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_connector.os, "write", fail)
    assert store.save(key(50), key(51)) == [False, False]
    monkeypatch.setattr(disk_connector.os, "write", write)
    assert store.save(key(52)) == [False]  # the pause
    warnings = [record for record in caplog.records if "not saved to disk" in record.getMessage()]
    assert len(warnings) == 1 and os.strerror(number) in warnings[0].getMessage()
    assert len(files(folder)) == (19 if number == errno.ENOSPC else 20) and not list(folder.rglob("*.tmp"))
    store.connector._paused_until = 0.0
    assert store.save(key(53)) == [True] and store.load(key(53), key(19)) == [True, True]


def test_a_block_larger_than_the_limit_is_not_saved(open_store, folder):
    store = open_store(size=1000)
    assert store.save(key(1)) == [False] and not files(folder)


def test_old_temporary_files_are_deleted(open_store, folder):
    store = open_store()
    store.save(key(1))
    left = files(folder)[0].with_name("1-x-1.tmp")
    for path, age in ((left, 7200), (left.with_name("new.tmp"), 0)):
        path.write_bytes(b"left by a killed engine")
        os.utime(path, (time.time() - age,) * 2)
    store.connector._index._scanned.clear()
    store.connector._index.scan()
    assert not left.exists() and left.with_name("new.tmp").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs 'path'"),
        ({"path": "x", "sise": 1}, "'path' .a folder. and 'size'"),
        ({"path": "x", "size": -1}, "must be a number of bytes"),
        ({"path": "/proc/nowhere"}, "cannot be used"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DiskConnector(KVConnectorContext(b"n" * 32, "e", "both", HostKVCache(1, [1]), None, options))


def test_changes_are_those_of_all_engines_and_of_its_own_namespace(open_store, folder):
    first = open_store()
    other_model = open_store(namespace=b"m" * 32)
    first.save(key(1))
    other_model.save(key(1), key(2))
    second = open_store()
    assert second.connector.take_changes(everything=True) == [StoreChange([key(1)], True)]
    second.save(key(3), key(4) + b"\x01\x00")
    second.save(key(5) + b"\xff\xff", is_state=True)
    second.save(key(3))  # it is there
    second.connector.discard([key(3)])
    assert second.connector.take_changes() == [
        StoreChange([key(3), key(4) + b"\x01\x00", key(5) + b"\xff\xff"], True),
        StoreChange([key(3)], False),
    ]
    first.connector.discard([key(1)])
    first.save(key(6))
    second.connector._index._scanned.clear()
    second.connector._index.scan()
    changes = second.connector.take_changes()
    assert sorted(changes, key=lambda change: change.is_stored) == [
        StoreChange([key(1)], False),
        StoreChange([key(6)], True),
    ]
    assert second.connector.take_changes() == []
    [everything] = second.connector.take_changes(everything=True)
    assert set(everything.keys) == {key(6), key(4) + b"\x01\x00", key(5) + b"\xff\xff"}


def test_files_that_are_deleted_for_room_are_reported(open_store):
    store = open_store(size=3 * NUM_BYTES)
    store.connector.take_changes(everything=True)
    for number in range(6):
        store.save(key(number))
    there = set()
    for change in store.connector.take_changes():
        there = there | set(change.keys) if change.is_stored else there - set(change.keys)
    assert there == {key(number) for number in range(6) if store.has(key(number)) == [True]} and 0 < len(there) < 4
