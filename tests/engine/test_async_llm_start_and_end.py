"""AsyncLLM with an engine of each test: a queue that is full at the start, and what is left at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.errors import ConfigError, EngineDeadError, QueueFullError
from mvllm.messages.sampling_params import RequestOutputKind
from tests.helpers.async_engine import SETTINGS, async_engine, joined, last, params

LONG = params(max_tokens=150, output_kind=RequestOutputKind.DELTA)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


def test_prompts_that_wait_for_a_thread_are_in_the_queue(checkpoint: Path) -> None:
    with async_engine(checkpoint, max_num_seqs=2, max_queued_requests=3) as llm:

        async def use() -> None:
            text = "x y " * 50_000  # too long; rejecting it takes a while
            found = await asyncio.gather(*(llm.add_request(text) for _ in range(12)), return_exceptions=True)
            assert [type(each) for each in found].count(QueueFullError) == 12 - (2 + 3)
            assert llm.num_requests == 0 and llm._admission.num_tokenizing == 0
            assert (await last(llm.generate([5], params(max_tokens=2)))).finished

        run(use())


def test_after_shutdown_nothing_is_left_and_use_is_an_error(checkpoint: Path) -> None:
    process = psutil.Process()

    def resources() -> tuple[set[psutil.Process], int, set[str]]:
        names = {thread.name for thread in threading.enumerate() if "tokenizer" not in thread.name}
        return set(process.children(recursive=True)), process.num_fds(), names

    before = resources()
    with async_engine(checkpoint, step_timeout=30) as llm:

        async def use() -> None:
            stream = await llm.add_request([5], LONG)
            await anext(stream)
            answer = asyncio.ensure_future(llm.check_health())
            texts = [asyncio.ensure_future(llm.tokenize("x" * 2_000_000)) for _ in range(6)]  # in threads
            await asyncio.sleep(0)  # they are in progress; the shutdown comes before the answer
            llm.shutdown()
            llm.shutdown()
            with pytest.raises(EngineDeadError, match="shut down"):
                await answer
            found = await asyncio.gather(*texts, return_exceptions=True)
            assert {type(each) for each in found if not isinstance(each, list)} == {EngineDeadError}
            with pytest.raises(EngineDeadError, match="shut down"):
                await llm.tokenize("x" * 5000)
            with pytest.raises(EngineDeadError, match="shut down"):
                await joined(stream)
            for use in (llm.add_request([5], LONG), llm.check_health(), llm.reset_prefix_cache(), llm.sleep()):
                with pytest.raises(EngineDeadError, match="shut down"):
                    await use
            assert not llm.is_running

        run(use())
    assert resources() == before


def test_offline_executors_are_rejected(checkpoint: Path) -> None:
    for settings in ({"engine_core_process": False}, {"distributed_executor_backend": "external_launcher"}):
        with pytest.raises(ConfigError, match="process of its own"):
            AsyncLLM.from_engine_args(EngineArgs.from_kwargs(model=str(checkpoint), **(SETTINGS | settings)))
