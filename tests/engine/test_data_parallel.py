"""Two replicas behind one AsyncLLM give the tokens of one engine, share the work, and fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.process.dp_async_mp_client import DPLBAsyncMPClient
from mvllm.errors import CacheError, EngineDeadError, QueueFullError
from mvllm.messages.sampling_params import RequestOutputKind
from tests.engine.test_async_scheduling import TIGHT
from tests.engine.test_mtp import mtp, reference
from tests.engine.test_speculative import NGRAM
from tests.helpers.async_engine import PROMPTS, SETTINGS, async_engine, joined, last, params
from tests.helpers.parity import engine
from tests.helpers.processes import stop_process

LONG = params(max_tokens=150, output_kind=RequestOutputKind.DELTA)
TWO = {"data_parallel_size": 2}


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[AsyncLLM]:
    with async_engine(checkpoint, **TWO) as llm:
        yield llm


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def client_of(llm: AsyncLLM) -> DPLBAsyncMPClient:
    assert isinstance(llm._client, DPLBAsyncMPClient)
    return llm._client


def test_tokens_are_those_of_one_engine_and_both_replicas_generate(
    llm: AsyncLLM, checkpoint: Path, loop: asyncio.AbstractEventLoop
) -> None:
    prompts = [f"{i} times {PROMPTS[i % 2]}" for i in range(40)]
    with engine(checkpoint) as offline:
        expected = [o.outputs[0].token_ids for o in offline.generate(prompts, params(), use_tqdm=False)]
    before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in llm.core_pids]

    async def all_of_them() -> None:
        outputs = await asyncio.gather(*(last(llm.generate(prompt, params())) for prompt in prompts))
        assert [output.outputs[0].token_ids for output in outputs] == expected

    loop.run_until_complete(all_of_them())
    assert client_of(llm).num_unfinished == [0, 0] and not client_of(llm)._rank_by_request_id
    after = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in llm.core_pids]
    assert len(after) == 2 and all(late > early for early, late in zip(before, after))


def test_requests_are_distributed_aborted_and_removed(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    async def some() -> None:
        streams = [await llm.add_request([5 + i, 6], LONG) for i in range(6)]
        several = await llm.add_request([4, 4], params(max_tokens=150, n=4, temperature=1.0))
        assert sorted(client_of(llm).num_unfinished) in ([3, 7], [4, 6], [5, 5])  # sequences stay together
        several.close()
        assert client_of(llm).num_unfinished == [3, 3]
        for stream in streams[:2]:
            await anext(stream)
        await llm.check_health()
        stop = await joined(llm.generate([9, 9], params(stop=["e", "a", "t"], max_tokens=150, ignore_eos=True)))
        assert stop[0]
        for stream in streams:
            stream.close()
        assert client_of(llm).num_unfinished == [0, 0] and not client_of(llm)._rank_by_request_id
        assert await llm.reset_prefix_cache()
        assert (llm.stats.num_running, llm.stats.num_waiting, llm.stats.kv_cache_usage) == (0, 0, 0.0)
        assert llm.heartbeat_age == 0.0

    loop.run_until_complete(some())


def test_a_prompt_is_routed_to_the_replica_that_caches_its_prefix(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    async def again() -> list[int]:
        await llm.reset_prefix_cache()
        beginning = [list(range(10 + i, 90 + i)) for i in range(2)]
        outputs = [await last(llm.generate(beginning[i % 2] + [i], params(max_tokens=2))) for i in range(8)]
        return [output.num_cached_tokens for output in outputs]

    assert loop.run_until_complete(again()) == [0, 0] + [80] * 6


@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.exhaustive), "mtp"])
def test_replicas_with_drafts_planned_ahead_neither_double_nor_lose_a_token(checkpoint: Path, method: str) -> None:
    """Deltas of each stream, while others are aborted, stop and are preempted."""
    folder = checkpoint if method == "ngram" else reference("mimo", "near").folder
    drafts = NGRAM if method == "ngram" else mtp(3)["speculative_config"]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 3}, {"stop_token_ids": list(range(0, 320, 9))}]
    prompts = [{"prompt_token_ids": [5 + i % 4, 6, 7] * (2 + i % 5)} for i in range(30)]
    wanted = [params(max_tokens=60, **kinds[i % 3]) for i in range(30)]
    with engine(folder) as offline:
        expected = [list(o.outputs[0].token_ids) for o in offline.generate(prompts, wanted, use_tqdm=False)]

    async def tokens_of(llm: AsyncLLM, i: int, most: int) -> list[int]:
        sent = params(max_tokens=60, output_kind=RequestOutputKind.DELTA, **kinds[i % 3])
        stream, found = await llm.add_request(prompts[i], sent), []
        async for output in stream:
            found += output.outputs[0].token_ids
            if len(found) >= most:
                stream.close()
                break
        return found

    async def all_of_them(llm: AsyncLLM) -> None:
        most = [(i % 7) * 3 + 1 if i % 4 == 1 else 99 for i in range(30)]
        found = await asyncio.gather(*(tokens_of(llm, i, most[i]) for i in range(30)))
        for i, tokens in enumerate(found):
            assert tokens == expected[i][: len(tokens)] and (most[i] < 99 or len(tokens) == len(expected[i]))
        assert client_of(llm).num_unfinished == [0, 0]
        assert llm.stats.num_accepted_tokens > 0

    size = TIGHT["kv_cache_memory_bytes"] * (1 if method == "ngram" else 2)  # two models
    settings = {"async_scheduling": True, "kv_cache_memory_bytes": size, "max_num_seqs": 6}
    with async_engine(folder, speculative_config=drafts, data_parallel_size=2, **settings) as llm:
        asyncio.run(all_of_them(llm))


def test_each_replica_has_its_rank_in_its_process_title(llm: AsyncLLM) -> None:
    for rank, pid in enumerate(llm.core_pids):
        assert f"EngineCore_DP{rank}" in psutil.Process(pid).cmdline()


def test_the_queue_limit_counts_all_replicas_and_a_dead_replica_ends_the_engine(checkpoint: Path) -> None:
    async def fill(llm: AsyncLLM) -> None:
        streams = [await llm.add_request([5 + i], LONG) for i in range(4)]
        with pytest.raises(QueueFullError, match="4 can run at once"):
            await llm.add_request([5], LONG)
        living, dead = map(psutil.Process, llm.core_pids)
        stop_process(living.pid)  # so that it cannot finish the requests before the death is noticed
        dead.kill()
        for stream in streams:  # also those of the other replica
            with pytest.raises(EngineDeadError, match=r"EngineCore_DP1 .* was killed by SIGKILL"):
                await joined(stream)
        living.resume()
        assert llm.errored
        with pytest.raises(EngineDeadError, match="EngineCore_DP1"):
            await llm.add_request([5], LONG)

    children = set(psutil.Process().children())
    with async_engine(checkpoint, max_num_seqs=2, max_queued_requests=0, **TWO) as llm:
        asyncio.run(asyncio.wait_for(fill(llm), 120))
    assert set(psutil.Process().children()) <= children


def test_a_replica_that_fails_to_start_ends_the_other(checkpoint: Path) -> None:
    children = set(psutil.Process().children())
    with pytest.raises(CacheError, match="max_model_len"):
        AsyncLLM.from_engine_args(
            EngineArgs.from_kwargs(model=str(checkpoint), **(SETTINGS | TWO | {"kv_cache_memory_bytes": 1000}))
        )
    assert set(psutil.Process().children()) <= children
