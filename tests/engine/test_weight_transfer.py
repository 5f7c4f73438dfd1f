"""An AsyncLLM serves while it waits for a trainer's process group, and while tensors are copied for an update."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from mvllm import RequestError, SamplingParams, WeightTransferGroup, WeightTransferInfo
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend import weight_update_source
from mvllm.models import shared_memory_weights
from tests.helpers.async_engine import async_engine, last
from tests.helpers.changed_weights import changed_copy, tensors_of
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import engine
from tests.helpers.ports import free_port
from tests.helpers.processes import assert_no_new_shared_memory, shared_memory_names

PROMPT = {"prompt_token_ids": [5, 6, 7, 8] * 6}
Run = Callable[[Coroutine[Any, Any, None]], None]
GREEDY = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=8)


class Checkpoints:
    """A checkpoint, one of the same shape with other weights, and the greedy tokens of new engines on both."""

    def __init__(self, folder: Path) -> None:
        self.old = make_checkpoint("llama-gqa", folder / "old")
        self.new = changed_copy(self.old, folder / "new")
        self.tensors = tensors_of(self.new)
        self.old_tokens, self.new_tokens = map(_tokens_of_a_new_engine, (self.old, self.new))
        assert self.old_tokens != self.new_tokens


def _tokens_of_a_new_engine(folder: Path) -> list[int]:
    with engine(folder) as llm:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints) -> Iterator[AsyncLLM]:
    """Two ranks, each a process. Its outputs come to one event loop, that of `run`."""
    with async_engine(checkpoints.old, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        yield llm


@pytest.fixture(scope="module")
def run(llm: AsyncLLM) -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield lambda scenario: runner.run(asyncio.wait_for(scenario, 120))


def group_of(world_size: int, timeout: float) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": world_size, "timeout": timeout}


async def tokens(llm: AsyncLLM) -> list[int]:
    return (await last(llm.generate(PROMPT, GREEDY))).outputs[0].token_ids


async def join_and_update(llm: AsyncLLM, checkpoints: Checkpoints) -> None:
    # No trainer comes: an error after the timeout, and the next call is not affected by it.
    with pytest.raises(RequestError, match=r"cannot be joined as rank|is not complete after"):
        await llm.init_weight_transfer_engine(group_of(3, timeout=0.3))

    # The group has no place for the second rank: the first one does not wait, either.
    with pytest.raises(RequestError, match="2 workers from rank_offset 1 on need 3"):
        await llm.init_weight_transfer_engine(group_of(2, timeout=30))

    # A call that was cancelled does not wait on, however early, and does not disturb the next one at its address.
    info = group_of(3, timeout=60)
    for seconds in (0.0, 0.05):
        waiting = asyncio.ensure_future(llm.init_weight_transfer_engine(info))
        await asyncio.sleep(seconds)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    waiting = asyncio.ensure_future(llm.init_weight_transfer_engine(info))
    await asyncio.sleep(0.05)
    assert await tokens(llm) == checkpoints.old_tokens, "requests run while it waits"
    assert (await llm.weight_info())["weight_version"] == 0
    with pytest.raises(RequestError, match="still joining"):
        await llm.init_weight_transfer_engine(group_of(3, timeout=60))
    announced = WeightTransferGroup.describe(checkpoints.tensors)
    with pytest.raises(RequestError, match="has joined none yet"):
        await llm.update_weights(announced)
    assert not waiting.done()

    trainer = await asyncio.to_thread(WeightTransferGroup, WeightTransferInfo(**info))
    await waiting
    sending = asyncio.ensure_future(asyncio.to_thread(trainer.send, checkpoints.tensors))
    await llm.update_weights(announced)
    await sending
    assert await tokens(llm) == checkpoints.new_tokens
    await llm.update_weights(path=str(checkpoints.old))
    assert await tokens(llm) == checkpoints.old_tokens
    trainer.close()


def test_two_ranks_serve_while_they_wait_for_the_trainer_and_take_its_weights(
    llm: AsyncLLM, checkpoints: Checkpoints, run: Run
) -> None:
    run(join_and_update(llm, checkpoints))


def test_sleep_within_an_update_is_refused_and_aborts_no_request(
    llm: AsyncLLM, checkpoints: Checkpoints, run: Run
) -> None:
    async def main() -> None:
        long = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=100)
        running = asyncio.ensure_future(last(llm.generate(PROMPT, long)))
        while not llm.stats.num_running:
            await asyncio.sleep(0.005)
        await llm.start_weight_update()
        refused = await asyncio.gather(llm.sleep(1), llm.sleep(1), return_exceptions=True)
        assert all("A weight update is under way" in str(each) for each in refused)
        cancelled = asyncio.ensure_future(llm.sleep(1))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        while await llm.is_sleeping():  # it goes on, and is refused, too
            await asyncio.sleep(0.005)
        waiting = asyncio.ensure_future(last(llm.generate(PROMPT, GREEDY)))  # is accepted
        await llm.abandon_weight_update()
        assert (await running).outputs[0].finish_reason == "length"
        assert (await waiting).outputs[0].token_ids == checkpoints.old_tokens

    run(main())


@pytest.mark.parametrize("source", ["tensors", "safetensors"])
def test_the_event_loop_goes_on_while_tensors_are_copied(
    llm: AsyncLLM, checkpoints: Checkpoints, source: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy waits for something that the event loop does."""
    copying, may_end = threading.Event(), threading.Event()
    original = shared_memory_weights.SharedMemoryWeights

    def copy(weights: Any) -> Any:
        copying.set()
        assert may_end.wait(120)
        return original(weights)

    monkeypatch.setattr(shared_memory_weights, "SharedMemoryWeights", copy)
    given: Any = checkpoints.tensors if source == "tensors" else save(checkpoints.tensors)
    before = shared_memory_names()

    async def main() -> None:
        version = (await llm.weight_info())["weight_version"]
        updating = asyncio.ensure_future(llm.update_weights({source: given}))
        while not copying.is_set():
            await asyncio.sleep(0.005)
        assert await tokens(llm) == checkpoints.old_tokens
        may_end.set()
        await updating
        assert await tokens(llm) == checkpoints.new_tokens
        assert (await llm.weight_info())["weight_version"] == version + 1

        copying.clear()
        may_end.clear()
        cancelled = asyncio.ensure_future(llm.update_weights({source: given}))
        while not copying.is_set():
            await asyncio.sleep(0.005)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        may_end.set()
        while (await llm.weight_info())["weight_version"] < version + 2:  # the update goes on without its caller
            await asyncio.sleep(0.005)
        await llm.update_weights(path=str(checkpoints.old))

    run(main())
    assert_no_new_shared_memory(before)


def test_a_field_that_is_not_known_is_refused_before_anything_is_copied() -> None:
    async def main() -> None:
        async with weight_update_source.weight_update_in_thread({"tensors": {"x": torch.zeros(1)}, "other": 1}):
            raise AssertionError("not reached")

    with pytest.raises(RequestError, match="update_info"):
        asyncio.run(main())
