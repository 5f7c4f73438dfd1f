"""Engines publish what their cache on disk has."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mvllm.kv_events.subscriber import KVEventSubscriber
from mvllm.messages.kv_events import DEVICE, DISK, HOST
from tests.engine.test_kv_events import PROMPT, events_config
from tests.helpers.async_engine import params
from tests.helpers.parity import engine


def poll_until(client: KVEventSubscriber, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, [block.media for block in client.index.blocks.values()]
        client.poll(0.05)


def test_a_subscriber_knows_the_blocks_of_host_memory_and_disk(checkpoint: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "kv_events_config": events_config(tmp_path),
        "block_size": 16,
        "kv_offloading_size": 0.01,
        "kv_disk_cache": str(tmp_path / "kv"),
        "engine_core_process": True,  # one that is idle reports what its connectors do
    }

    def subscribe() -> KVEventSubscriber:
        return KVEventSubscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", check_seconds=0.05)

    prompt = {"prompt_token_ids": PROMPT}
    with engine(checkpoint, **settings) as llm:
        client, blocks = subscribe(), [tuple(PROMPT[i : i + 16]) for i in range(0, 64, 16)]
        client.poll(1.0)
        llm.generate(prompt, params(max_tokens=2), use_tqdm=False)
        poll_until(client, lambda: len(client.index.hashes(DISK)) == 4)
        assert client.index.hashes(DEVICE) == client.index.hashes(HOST) == client.index.hashes(DISK)
        assert [block.token_ids for block in client.index.blocks.values()] == blocks
        stored = client.index.hashes(DISK)
        client.close()
    with engine(checkpoint, **settings) as llm:  # knows the names of the files, and not yet what they contain
        client = subscribe()
        client.poll(1.0)
        poll_until(client, lambda: client.index.hashes(DISK) == stored)
        assert not any(block.token_ids for block in client.index.blocks.values())
        [output] = llm.generate(prompt, params(max_tokens=2), use_tqdm=False)
        assert output.num_cached_tokens == 64
        poll_until(client, lambda: client.index.hashes(DEVICE) == stored)
        assert client.index.hashes(HOST) == stored
        assert {block.token_ids for block in client.index.blocks.values()} == set(blocks)
        assert llm.reset_prefix_cache()
        poll_until(client, lambda: not client.index.blocks)
        client.close()
