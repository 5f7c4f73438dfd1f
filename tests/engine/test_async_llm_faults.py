"""When a process of an AsyncLLM's engine dies or hangs, every caller gets the cause, and no process is left."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from mvllm import SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.request_output_stream import RequestOutputStream
from mvllm.errors import CacheError, EngineDeadError, WorkerDiedError, WorkerError
from mvllm.messages.sampling_params import RequestOutputKind
from tests.helpers.plugins import prepend, scripted_platform_path
from tests.helpers.processes import (
    TAG,
    assert_nothing_left,
    new_tag,
    shared_memory_names,
    stop_process,
    wait_until,
    worker_processes,
)

pytestmark = pytest.mark.fresh_programs  # the scripted workers show that core imports no torch
LONG = SamplingParams(max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA, detokenize=False)
Make = Callable[..., AsyncLLM]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Builds engines with scripted workers; after the test none of their processes may be left."""
    prepend(monkeypatch, scripted_platform_path(tmp_path))
    tag, before = new_tag(), shared_memory_names()
    monkeypatch.setenv(TAG, tag)

    with ExitStack() as stack:

        def build(mode: str, **settings: object) -> AsyncLLM:
            monkeypatch.setenv("SCRIPTED_WORKER", mode)
            defaults = {
                "model": "demo",
                "platform": "scripted",
                "distributed_executor_backend": "mp",
                "kv_cache_memory_bytes": 1 << 24,
                "memory_utilization": 0.5,
                "dtype": "float32",
                "skip_tokenizer_init": True,
                "max_num_seqs": 2,
            }
            llm = AsyncLLM.from_engine_args(EngineArgs.from_kwargs(**(defaults | settings)))
            stack.callback(llm.shutdown)
            return llm

        yield build
    assert_nothing_left(tag, before)


def process(name: str) -> psutil.Process:
    (found,) = worker_processes(os.environ[TAG], name)
    return found


async def begin(llm: AsyncLLM, count: int = 4) -> list[RequestOutputStream]:
    """Starts requests. Two of them run and have output; the others wait."""
    streams = [await llm.add_request([5, 6, 7 + i], LONG) for i in range(count)]
    for stream in streams[:2]:
        await anext(stream)
    return streams


async def end(stream: RequestOutputStream) -> Exception:
    """The exception that a caller gets on its next read."""
    with pytest.raises(EngineDeadError) as caught:
        async for _ in stream:
            pass
    return caught.value


def within_two_minutes(main) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_a_killed_process_is_named_to_every_caller(make: Make, victim: str) -> None:
    llm = make("slow")

    async def kill() -> None:
        streams = await begin(llm)
        health = asyncio.create_task(llm.check_health())
        killed = process(victim)
        killed.kill()
        for error in await asyncio.gather(*map(end, streams)):
            assert re.search(rf"{victim}.*pid {killed.pid}.* was killed by SIGKILL", str(error))
        if victim != "EngineCore":
            assert any(isinstance(cause, WorkerDiedError) for cause in causes_of(error))
        with pytest.raises(EngineDeadError):
            await health
        assert llm.errored and not llm.is_running and "SIGKILL" in str(llm.dead_error)
        for use in (llm.add_request([5], LONG), llm.check_health(), llm.reset_prefix_cache(), llm.sleep()):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await use
        assert llm.num_requests == 0
        await llm.abort("0")
        streams[0].close()

    within_two_minutes(kill())


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def test_a_failed_step_ends_all_requests_after_their_pending_outputs(make: Make) -> None:
    llm = make("yes")  # fails in step 13

    async def fail() -> None:
        streams = [await llm.add_request([5, 6, 7 + i], LONG) for i in range(3)]
        ids: list[int] = []
        with pytest.raises(EngineDeadError, match="unlucky") as caught:
            async for output in streams[0]:
                ids += output.outputs[0].token_ids
        assert len(ids) == 13
        assert any(isinstance(cause, WorkerError) for cause in causes_of(caught.value))
        assert "unlucky" in str(await end(streams[2]))

    within_two_minutes(fail())


def test_the_death_of_an_idle_engine_is_noticed(make: Make) -> None:
    llm = make("slow")
    assert llm.dead_error is None
    process("EngineCore").kill()
    wait_until(lambda: llm.errored, 120, "its death is noticed")  # no event loop has run yet
    assert "SIGKILL" in str(llm.dead_error)

    async def use() -> None:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.add_request([5], LONG)

    within_two_minutes(use())


def test_a_hanging_core_raises_the_heartbeat_age_and_may_continue(make: Make) -> None:
    llm = make("slow")

    async def hang() -> None:
        streams = await begin(llm, 2)
        core = process("EngineCore")
        stop_process(core.pid)
        while llm.heartbeat_age < 1.0:
            await asyncio.sleep(0.05)
        assert llm.load.heartbeat_age >= 1.0 and not llm.errored
        core.resume()
        while llm.heartbeat_age > 0.9:
            await asyncio.sleep(0.05)
        for stream in streams:
            await anext(stream)
            stream.close()
        await llm.reset_prefix_cache()
        assert llm.heartbeat_age == 0.0

    within_two_minutes(hang())


def test_a_core_that_hangs_for_too_long_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mvllm.engine.process.launched_core_connection.TIMEOUT_MARGIN_SECONDS", 1.0)
    llm = make("slow", step_timeout=5)

    async def hang() -> None:
        streams = await begin(llm, 3)
        core = process("EngineCore")
        stop_process(core.pid)
        for error in await asyncio.gather(*map(end, streams)):
            assert f"EngineCore (pid {core.pid}) has given no sign of life within 6 s" in str(error)
        wait_until(lambda: not core.is_running(), 120, "the stopped core is gone")

    within_two_minutes(hang())


def test_a_startup_error_is_the_error_of_the_core(make: Make) -> None:
    with pytest.raises(CacheError, match=r"max_model_len .* needs .* of KV cache"):
        make("slow", kv_cache_memory_bytes=1000)


def test_an_engine_whose_loop_has_ended_can_be_shut_down(make: Make) -> None:
    llm = make("slow")
    within_two_minutes(begin(llm))  # the fixture checks that no process is left
    llm.shutdown()
    assert not worker_processes(os.environ[TAG], "EngineCore") and not worker_processes(os.environ[TAG], "Worker")
