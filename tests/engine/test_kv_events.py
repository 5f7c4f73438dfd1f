"""Engines publish the events of their KV caches, and replicas report theirs to the front end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from mvllm.engine.process.dp_async_mp_client import DPLBAsyncMPClient
from mvllm.kv_events.subscriber import KVEventSubscriber
from mvllm.messages.kv_events import DEVICE
from tests.helpers.async_engine import async_engine, last, params
from tests.helpers.parity import engine

PROMPT = [5 + i % 90 for i in range(70)]


def events_config(folder: Path) -> dict[str, object]:
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
    }


def test_a_subscriber_knows_the_blocks_of_an_engine(checkpoint: Path, tmp_path: Path) -> None:
    with engine(checkpoint, kv_events_config=events_config(tmp_path), block_size=16) as llm:
        client = KVEventSubscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", check_seconds=0.05)
        client.poll(1.0)
        for length in (40, 70):
            llm.generate({"prompt_token_ids": PROMPT[:length]}, params(max_tokens=4), use_tqdm=False)
            deadline = time.monotonic() + 120
            while len(client.index.blocks) < length // 16:
                assert time.monotonic() < deadline
                client.poll(0.05)
        texts = [list(block.token_ids) for block in client.index.blocks.values()]
        assert texts[:4] == [PROMPT[i : i + 16] for i in range(0, 64, 16)]
        assert client.index.hashes(DEVICE) == set(client.index.blocks)
        assert llm.reset_prefix_cache()
        deadline = time.monotonic() + 120
        while client.index.blocks:
            assert time.monotonic() < deadline
            client.poll(0.05)
        client.close()


def test_replicas_publish_on_their_own_addresses_and_report_their_caches(checkpoint: Path, tmp_path: Path) -> None:
    config = events_config(tmp_path)
    with async_engine(checkpoint, data_parallel_size=2, kv_events_config=config, block_size=16) as llm:
        balancer = llm._client._load_balancer  # type: ignore[union-attr]
        assert isinstance(llm._client, DPLBAsyncMPClient)
        clients = [
            KVEventSubscriber(f"ipc://{tmp_path}/events{rank}", f"ipc://{tmp_path}/replay{rank}", check_seconds=0.05)
            for rank in ("", "_dp1")
        ]

        async def ask(number: int) -> None:
            prompt = {"prompt_token_ids": [6 + number] * 3 + PROMPT[3:]}
            await last(llm.generate(prompt, params(max_tokens=3)))

        async def ask_all() -> None:
            await asyncio.gather(*(ask(number) for number in range(4)))

        asyncio.run(ask_all())
        deadline = time.monotonic() + 120
        while sum(len(client.index.blocks) for client in clients) < 4 * 4:
            assert time.monotonic() < deadline
            for client in clients:
                client.poll(0.02)
        assert all(client.index.blocks for client in clients)
        for number in range(4):
            prompt = [6 + number] * 3 + PROMPT[3:]
            known = [rank for rank in range(2) if balancer.num_cached_tokens(rank, prompt)]
            texts = [{block.token_ids for block in client.index.blocks.values()} for client in clients]
            assert known == [rank for rank in range(2) if tuple(prompt[:16]) in texts[rank]] and len(known) == 1
        assert not any(balancer._sent.keys(rank) for rank in range(2))  # only reports count now
        for client in clients:
            client.close()
