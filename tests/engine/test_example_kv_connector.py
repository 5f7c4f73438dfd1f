"""The example KV connector, installed as a package: engines find blocks in its SQLite file, and events report them."""

from __future__ import annotations

import sqlite3
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mvllm import SamplingParams
from mvllm.errors import ConfigError
from mvllm.extension_api.kv_transfer import HostBlock, HostKVCache, KVConnectorContext, KVRequest, StoreChange
from mvllm.kv_events.subscriber import KVEventSubscriber
from tests.helpers.parity import engine
from tests.helpers.plugins import ROOT, prepend, write_metadata

FOLDER = ROOT / "plugins" / "example-kv-connector"
PROMPT = [5 + i % 90 for i in range(70)]
REQUEST = KVRequest("r")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    declared = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    [(group, points)] = declared["entry-points"].items()
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    site = write_metadata(tmp_path / "site", declared["name"], f"[{group}]\n{lines}")
    prepend(monkeypatch, [str(site), str(FOLDER / "src")])
    return tmp_path


def settings(file: Path, **options: Any) -> dict[str, Any]:
    options = {"path": str(file), **options}
    return {"kv_connector": "sqlite", "kv_role": "both", "kv_connector_extra_config": options}


def test_engines_find_what_an_earlier_one_has_stored(installed: Path, checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    file, prompt = installed / "blocks.sqlite", {"prompt_token_ids": PROMPT}

    def run(**more: Any) -> tuple[list[int], int]:
        with engine(checkpoint, block_size=16, **more) as llm:
            [output] = llm.generate(prompt, params, use_tqdm=False)
            return list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    expected, _ = run()
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{installed}/events",
        "replay_endpoint": f"ipc://{installed}/replay",
    }
    with engine(
        checkpoint,
        block_size=16,
        kv_transfer_config=settings(file),
        kv_events_config=events,
        engine_core_process=True,
    ) as llm:
        client = KVEventSubscriber(events["endpoint"], events["replay_endpoint"], check_seconds=0.05)
        llm.generate(prompt, params, use_tqdm=False)
        deadline = time.monotonic() + 120
        while len(client.index.hashes("sqlite")) < 4:
            assert time.monotonic() < deadline
            client.poll(0.05)
        client.close()
    assert run(kv_transfer_config=settings(file)) == (expected, 64)
    with sqlite3.connect(file) as database:
        database.execute("UPDATE blocks SET content = zeroblob(length(content)) WHERE rowid = 2")
    assert run(kv_transfer_config=settings(file)) == (expected, 16)  # the second block is computed
    with pytest.raises(ConfigError, match="takes the options 'path'"):
        run(kv_transfer_config=settings(file, color="red"))


def test_a_store_of_bounded_size(installed: Path) -> None:
    from mvllm_example_kv_connector import SQLiteConnector

    blocks, states = HostKVCache(4, [700, 300]), HostKVCache(2, [10])

    def open_store(namespace: bytes = b"n" * 32) -> SQLiteConnector:
        options = {"path": str(installed / "blocks.sqlite"), "size": 3000}
        return SQLiteConnector(KVConnectorContext(namespace, "e", "both", blocks, states, options))

    def transfer(store: SQLiteConnector, block: HostBlock, *, is_load: bool) -> bool:
        if is_load:
            store.start_load(REQUEST, [block])
        else:
            store.start_save([block])
        deadline = time.monotonic() + 120
        while not (results := store.poll()):
            assert time.monotonic() < deadline
            store.wait(1.0)
        [result] = results
        assert result.block == block and result.is_load == is_load
        return result.ok

    store, keys = open_store(), [bytes([i]) * 32 for i in range(5)]
    assert store.take_changes(everything=True) == [StoreChange([], True)]
    for i, key in enumerate(keys):
        blocks.block(0)[:] = i
        assert transfer(store, HostBlock(key, 0), is_load=False)
        if i == 2:
            assert transfer(store, HostBlock(keys[0], 1), is_load=True)  # used: it stays
    assert store.lookup(REQUEST, keys) == [True, False, False, True, True]
    assert store.stats() == {"bytes_used": 3000, "bytes_limit": 3000}
    assert [change.is_stored for change in store.take_changes()] == [True, True, True, False, True, False, True]
    assert transfer(store, HostBlock(keys[3], 2), is_load=True) and np.all(blocks.block(2) == 3)
    assert not transfer(store, HostBlock(keys[1], 2), is_load=True)
    other = open_store(b"m" * 32)
    assert other.lookup(REQUEST, keys) == [False] * 5
    other.close()
    store.discard([keys[3]])
    states.block(0)[:] = 9
    assert transfer(store, HostBlock(keys[0] + b"\xff\xff", 0, is_state=True), is_load=False)
    store.close()
    store.close()
    later = open_store()
    assert later.lookup(REQUEST, [*keys, keys[0] + b"\xff\xff"]) == [True, False, False, False, True, True]
    assert transfer(later, HostBlock(keys[0] + b"\xff\xff", 1, is_state=True), is_load=True)
    assert np.all(states.block(1) == 9)
    later.close()
