"""AsyncLLM: the same outputs as LLM for one caller and many; callers that abort, lag or send invalid requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from mvllm import LLM, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams
from mvllm.engine.async_llm import AsyncLLM
from mvllm.errors import (
    EngineSleepingError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    UnavailableError,
)
from mvllm.messages.commands import Sleep
from mvllm.messages.pooling_params import PoolingType
from mvllm.messages.sampling_params import RequestOutputKind
from tests.e2e.python_api_examples import example_AsyncLLM, example_RequestOutputKind
from tests.helpers.async_engine import PROMPTS, async_engine, joined, last, params
from tests.helpers.parity import bytes_of_blocks, engine

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
LONG = params(max_tokens=150, output_kind=DELTA)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[AsyncLLM]:
    with async_engine(checkpoint) as llm:
        yield llm


@pytest.fixture(scope="module")
def offline(checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint) as llm:
        yield llm


@pytest.fixture
def run(loop: asyncio.AbstractEventLoop) -> Run:
    return lambda main: loop.run_until_complete(asyncio.wait_for(main, 120))


@pytest.fixture(autouse=True)
def engine_is_idle(llm: AsyncLLM, run: Run) -> Iterator[None]:
    """After each test the shared engine is idle: no requests, and no blocks in use."""
    yield
    requests = llm._output_processor
    assert llm.num_requests == 0 and not requests._sequences and not requests._requests
    assert (requests.num_sequences, requests.num_prompt_tokens, llm._admission.num_tokenizing) == (0, 0, 0)
    assert run(llm.reset_prefix_cache())
    assert (llm.stats.num_running, llm.stats.num_waiting, llm.stats.kv_cache_usage) == (0, 0, 0.0)
    assert llm.heartbeat_age == 0.0


def comparable(output: RequestOutput) -> object:
    return (
        output.prompt,
        output.prompt_token_ids,
        output.prompt_logprobs,
        [(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs],
    )


# --- outputs


@pytest.mark.parametrize("kind", [CUMULATIVE, FINAL_ONLY])
def test_a_single_request_gives_the_output_of_llm(llm: AsyncLLM, offline: LLM, run: Run, kind: Any) -> None:
    asked = params(logprobs=2, prompt_logprobs=1, stop_token_ids=[9], output_kind=kind)
    for prompt in PROMPTS:
        (expected,) = offline.generate(prompt, asked, use_tqdm=False)
        assert comparable(run(last(llm.generate(prompt, asked)))) == comparable(expected)


@pytest.mark.parametrize("example", [example_AsyncLLM, example_RequestOutputKind])
def test_the_examples_of_the_python_api_run(llm: AsyncLLM, run: Run, example: Any) -> None:
    run(example(llm))


@pytest.mark.parametrize("stop", [None, ["e", "the"]])
def test_64_concurrent_requests_give_the_outputs_of_llm(
    llm: AsyncLLM, offline: LLM, run: Run, stop: list[str] | None
) -> None:
    prompts = [f"{i} times {PROMPTS[i % 2]}" for i in range(64)]
    expected = [o.outputs[0] for o in offline.generate(prompts, params(stop=stop), use_tqdm=False)]

    async def all_of_them() -> tuple[list[tuple[list[int], str]], list[RequestOutput]]:
        pieces = [joined(llm.generate(prompt, params(stop=stop, output_kind=DELTA))) for prompt in prompts]
        wholes = [last(llm.generate(prompt, params(stop=stop))) for prompt in prompts]
        return await asyncio.gather(*pieces), await asyncio.gather(*wholes)

    in_pieces, as_a_whole = run(all_of_them())
    assert in_pieces == [(c.token_ids, c.text) for c in expected]
    assert [(o.outputs[0].token_ids, o.outputs[0].text) for o in as_a_whole] == in_pieces
    assert [o.outputs[0].finish_reason for o in as_a_whole] == [c.finish_reason for c in expected]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_several_sequences_of_one_prompt(llm: AsyncLLM, offline: LLM, run: Run, kind: Any) -> None:
    asked = params(n=3, temperature=0.9, seed=7, output_kind=kind)
    (expected,) = offline.generate("The capital of", asked, use_tqdm=False)

    async def sequences() -> dict[int, list[int]]:
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for output in llm.generate("The capital of", asked):
            for sequence in output.outputs:
                ids[sequence.index] = sequence.token_ids if kind != DELTA else ids[sequence.index] + sequence.token_ids
        return ids

    assert run(sequences()) == {c.index: c.token_ids for c in expected.outputs}


def test_cumulative_outputs_only_grow_and_times_are_in_order(llm: AsyncLLM, run: Run) -> None:
    async def outputs() -> list[RequestOutput]:
        return [output async for output in llm.generate(PROMPTS[2], params(), "mine")]

    found = run(outputs())
    for before, after in itertools.pairwise(found):
        ids = before.outputs[0].token_ids
        assert after.outputs[0].token_ids[: len(ids)] == ids and after.outputs[0].text.startswith(
            before.outputs[0].text
        )
    assert {output.request_id for output in found} == {"mine"}
    times = found[-1].metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    assert times.first_token_time <= times.last_token_time <= times.finished_time


def test_a_final_output_has_the_time_of_its_first_token(llm: AsyncLLM, run: Run) -> None:
    times = run(last(llm.generate(PROMPTS[2], params(max_tokens=100, output_kind=FINAL_ONLY)))).metrics
    assert times.first_scheduled_time < times.first_token_time < times.last_token_time


# --- callers that abort


async def abort_by_break(llm: AsyncLLM, prompt: Any, asked: SamplingParams) -> None:
    outputs = llm.generate(prompt, asked)
    async for _ in outputs:
        break
    await outputs.aclose()


async def abort_by_cancellation(llm: AsyncLLM, prompt: Any, asked: SamplingParams) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate(prompt, asked):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def abort_by_error(llm: AsyncLLM, prompt: Any, asked: SamplingParams) -> None:
    stream = await llm.add_request(prompt, asked)
    with pytest.raises(ZeroDivisionError):
        async with stream:
            async for _ in stream:
                raise ZeroDivisionError
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


LEAVE = [abort_by_break, abort_by_cancellation, abort_by_error]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("n", [1, 3])
def test_closing_the_iterator_aborts_a_running_request(llm: AsyncLLM, run: Run, leave: Any, n: int) -> None:
    run(leave(llm, PROMPTS[0], params(max_tokens=100_000, n=n, temperature=0.5, output_kind=DELTA)))


def test_the_stacks_of_the_engine_core_can_be_read(llm: AsyncLLM, run: Run) -> None:
    assert llm.is_idle
    run(last(llm.generate(PROMPTS[0], params())))
    [description] = llm.describe_cores()
    assert str(llm.core_pids[0]) in description and "run_busy_loop" in description


def test_a_cancelled_change_of_state_is_complete_or_undone(llm: AsyncLLM, run: Run, checkpoint: Path) -> None:
    async def cancelled(call: Coroutine[Any, Any, Any], num_turns: int) -> None:
        task = asyncio.create_task(call)
        for _ in range(num_turns):  # of the event loop
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def settled(is_asleep: bool) -> None:
        while llm.sleep_mode.is_changing:
            await asyncio.sleep(0.01)
        assert llm.is_asleep is is_asleep
        assert llm.heartbeat_age == 0.0

    async def test() -> None:
        version = (await llm.weight_info())["weight_version"]
        for num_turns in (2, 4, 8):
            await cancelled(llm.sleep(), num_turns)
            await settled(True)
            await cancelled(llm.wake_up(), num_turns)
            await settled(False)
            await cancelled(llm.pause_generation(mode="keep"), num_turns)
            assert not await llm.is_paused()
            await cancelled(llm.start_weight_update(), num_turns)
            assert not (await llm.weight_info())["is_updating"] and not await llm.is_paused()
            await cancelled(llm.update_weights(path=str(checkpoint)), num_turns)
            version += 1
            while (await llm.weight_info())["weight_version"] != version:
                await asyncio.sleep(0.01)
            running = asyncio.create_task(last(llm.generate(PROMPTS[0], LONG)))
            while not llm.num_requests:
                await asyncio.sleep(0)
            await cancelled(llm.pause_generation(mode="wait"), num_turns)
            assert not await llm.is_paused()
            await asyncio.gather(running, last(llm.generate(PROMPTS[1], params())))

    run(test())


def test_closing_the_iterator_before_the_first_output_aborts_the_request(llm: AsyncLLM, run: Run) -> None:
    async def leave() -> None:
        stream = await llm.add_request(PROMPTS[0], LONG)  # not sent yet
        stream.close()
        task = asyncio.create_task(last(llm.generate(PROMPTS[0], LONG)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(leave())


def test_waiting_and_preempted_requests_can_be_aborted(checkpoint: Path, offline: LLM, run: Run) -> None:
    """Twelve blocks of KV cache, three requests that grow to ten each: one runs, one is preempted, one never ran."""
    with async_engine(checkpoint, max_num_seqs=2, kv_cache_memory_bytes=bytes_of_blocks(offline, 12)) as llm:

        async def states() -> None:
            streams = [await llm.add_request([5 + i, 6, 7], LONG, f"r{i}") for i in range(3)]
            while not llm.stats.num_preemptions:
                await anext(streams[0])
            assert llm.stats.num_waiting >= 1
            await llm.abort(["r1", "r2", "unknown"])  # the preempted request, and the one that never ran
            ends = [await last(stream) for stream in streams[1:]]
            assert [end.outputs[0].finish_reason for end in ends] == ["abort", "abort"]
            streams[0].close()
            assert await llm.reset_prefix_cache()
            assert (llm.stats.num_running, llm.stats.num_waiting, llm.stats.kv_cache_usage) == (0, 0, 0.0)
            assert len((await joined(llm.generate([5, 6, 7], LONG)))[0]) == 150

        run(states())


def test_an_aborted_request_returns_its_output_so_far(llm: AsyncLLM, run: Run) -> None:
    async def abort() -> None:
        stream = await llm.add_request(PROMPTS[0], params(max_tokens=150, n=2, temperature=0.5), "me")
        before = await anext(stream)
        await llm.abort("me")
        end = await last(stream)
        assert [c.finish_reason for c in end.outputs] == ["abort", "abort"]
        for early, late in zip(before.outputs, end.outputs):
            assert late.token_ids[: len(early.token_ids)] == early.token_ids
        streams = [await llm.add_request(PROMPTS[i], LONG) for i in range(3)]
        await llm.abort_all()
        assert [(await last(stream)).outputs[0].finish_reason for stream in streams] == ["abort"] * 3
        assert await llm.wait_for_requests_to_drain(60)

    run(abort())


# --- duplicate ids, slow callers, invalid requests


def test_two_concurrent_requests_may_have_the_same_id(llm: AsyncLLM, offline: LLM, run: Run) -> None:
    expected = [o.outputs[0].token_ids for o in offline.generate(PROMPTS[:2], params(), use_tqdm=False)]

    async def both() -> None:
        streams = [await llm.add_request(prompt, params(), "same") for prompt in PROMPTS[:2]]
        ends = await asyncio.gather(*map(last, streams))
        assert [end.outputs[0].token_ids for end in ends] == expected
        assert [end.request_id for end in ends] == ["same", "same"]
        streams = [await llm.add_request(prompt, LONG, "same") for prompt in PROMPTS[:2]]
        streams[0].close()
        ids, _ = await joined(streams[1])
        assert len(ids) == 150 and ids[:20] == expected[1]

    run(both())


def test_a_slow_caller_gets_one_output_and_delays_no_other(llm: AsyncLLM, run: Run) -> None:
    async def lag() -> None:
        slow = await llm.add_request(PROMPTS[0], LONG)
        first = await anext(slow)
        quick = await joined(llm.generate(PROMPTS[0], LONG))
        assert await llm.wait_for_requests_to_drain(
            60
        )  # also the slow caller's request: its tokens are generated at full speed
        rest = await anext(slow)
        assert rest.finished and first.outputs[0].token_ids + rest.outputs[0].token_ids == quick[0]
        assert first.outputs[0].text + rest.outputs[0].text == quick[1]
        with pytest.raises(StopAsyncIteration):
            await anext(slow)

    run(lag())


@pytest.mark.parametrize(
    ("prompt", "asked", "said"),
    [
        ([5, 100_000], params(), "vocabulary"),
        ([5] * 176, params(), "max_model_len"),
        ("x" * 100_000, params(), "max_model_len"),
        ("\ud800", params(), "surrogate"),
        ([], params(), "empty"),
        ({"promt": "x"}, params(), "Did you mean 'prompt'"),
        ([5], params(stop_token_ids=[100_000]), "stop_token_ids"),
        ([5], "greedy", "must be SamplingParams"),
        (7, params(), "A prompt is"),
    ],
)
def test_invalid_requests_are_rejected_before_anything_is_queued(
    llm: AsyncLLM, run: Run, prompt: Any, asked: Any, said: str
) -> None:
    async def refused() -> None:
        with pytest.raises(RequestError, match=said):
            await llm.add_request(prompt, asked)
        with pytest.raises(RequestError, match=said):
            async for _ in llm.generate(prompt, asked):
                pass
        with pytest.raises(RequestError, match=f"Prompt 1 of 2.*{said}"):
            await llm.add_requests([[5, 6], prompt], [params(), asked])
        assert llm.num_requests == 0

    run(refused())


def test_the_default_queue_accepts_many_requests(llm: AsyncLLM, run: Run) -> None:
    async def send() -> None:
        first = await llm.add_request([5], LONG)
        streams = await llm.add_requests([[5]] * 1400, [params(max_tokens=1)] * 1400)
        assert llm.num_requests == 1401
        for stream in (first, *streams):
            stream.close()

    run(send())


def test_requests_beyond_the_queue_limit_are_rejected_until_there_is_room(checkpoint: Path, run: Run) -> None:
    with async_engine(checkpoint, max_num_seqs=2, max_queued_requests=3, max_queued_tokens=100) as llm:

        async def fill() -> None:
            streams = [await llm.add_request([5 + i], LONG) for i in range(5)]
            with pytest.raises(QueueFullError, match=r"5 sequences .* 3 may wait \(max_queued_requests\)") as caught:
                await llm.add_request([9], LONG)
            assert 1 <= caught.value.retry_after <= 60 and llm.metrics.refused == 1 and llm.num_requests == 5
            streams[4].close()
            streams[4] = await llm.add_request([9] * 90, LONG)
            streams[3].close()
            with pytest.raises(QueueFullError, match=r"max_queued_tokens"):
                await llm.add_request([9] * 20, LONG)
            with pytest.raises(QueueFullError):
                await llm.add_request([9], params(n=2, temperature=1.0))
            for stream in streams:
                stream.close()
            # An idle engine accepts one request even if it has more sequences than the queue limit.
            output = await last(llm.generate([9] * 120, params(n=9, temperature=1.0, max_tokens=3)))
            assert len(output.outputs) == 9

        run(fill())


# --- the event loop, the engine's state, shutdown


def test_use_from_another_event_loop_is_an_error(llm: AsyncLLM, run: Run) -> None:
    run(last(llm.generate([5], params(max_tokens=1))))
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(asyncio.wait_for(last(llm.generate([5], params(max_tokens=1))), 120))
    assert llm.num_requests == 0


def test_tokenizing_a_long_text_does_not_block_the_event_loop(llm: AsyncLLM, run: Run) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def refuse() -> None:
        counting = asyncio.create_task(count())
        ids = await llm.tokenize("some words and more of them " * 50_000)
        with pytest.raises(RequestError, match=f"has {len(ids)} tokens|at least"):
            await llm.add_request("some words and more of them " * 50_000, params())
        counting.cancel()

    run(refuse())
    assert turns > 5


def test_an_idle_engine_uses_almost_no_cpu_time(llm: AsyncLLM, run: Run) -> None:
    run(last(llm.generate(PROMPTS[0], params())))
    process = psutil.Process()
    before = sum(process.cpu_times()[:2])
    run(asyncio.sleep(2.0))
    assert sum(process.cpu_times()[:2]) - before < 0.1  # of 2 seconds; another thread of the tests' may have worked


def test_embeddings_among_generation_equal_those_of_llm(llm: AsyncLLM, offline: LLM, run: Run) -> None:
    expected = [output.outputs for output in offline.encode(PROMPTS, use_tqdm=False)]
    mean = PoolingParams(pooling_type=PoolingType.MEAN, normalize=False, dimensions=5)
    [short] = offline.encode(PROMPTS[1], mean, use_tqdm=False)

    async def vector(prompt: object, params: PoolingParams | None = None) -> PoolingRequestOutput:
        [output] = [output async for output in llm.encode(prompt, params, "mine")]  # type: ignore[arg-type]
        assert output.finished and output.request_id == "mine"
        return output

    async def main() -> None:
        texts = [asyncio.ensure_future(last(llm.generate(prompt, LONG))) for prompt in PROMPTS]
        found = await asyncio.gather(*(vector(prompt) for prompt in PROMPTS), vector(PROMPTS[1], mean))
        for output, wanted in zip(found, [*expected, short.outputs], strict=True):
            np.testing.assert_allclose(output.outputs.data, wanted.data, atol=1e-5)
        assert found[0].prompt == PROMPTS[0] and found[0].metrics is not None
        with pytest.raises(RequestError, match="components"):
            await vector(PROMPTS[0], PoolingParams(dimensions=10**6))
        await asyncio.gather(*texts)

    counted = llm.metrics.prompt_tokens, llm.metrics.e2e_latency.sum
    run(main())
    assert llm.metrics.prompt_tokens > counted[0] and llm.metrics.e2e_latency.sum > counted[1]


def test_closing_the_iterator_before_the_embedding_aborts_the_request(llm: AsyncLLM, run: Run) -> None:
    async def main() -> None:
        streams = await llm.add_requests([[7] * 170] * 30, [None] * 30, pooling=True)
        streams[0].close()
        await llm.abort_all()
        for stream in streams[1:]:
            async for output in stream:
                with pytest.raises(UnavailableError, match="aborted"):
                    PoolingRequestOutput.from_request_output(output)

    run(main())  # the fixture checks that no requests are left


def test_requests_are_rejected_while_asleep_and_accepted_when_awake(llm: AsyncLLM, run: Run) -> None:
    async def sleep_and_wake_up(level: int) -> None:
        stream = await llm.add_request(PROMPTS[0], LONG)
        await llm.sleep(level)
        assert (await last(stream)).outputs[0].finish_reason == "abort"
        assert await llm.is_sleeping() and llm.is_asleep
        with pytest.raises(EngineSleepingError, match="wake_up"):
            await llm.add_request(PROMPTS[0], LONG)
        with pytest.raises(EngineSleepingError, match="wake_up"):
            await anext(llm.encode(PROMPTS[0]))
        with pytest.raises(RequestError, match="level"):
            await llm.sleep(3)
        await llm.check_health()
        await llm.wake_up(["weights"])
        assert llm.is_asleep
        await llm.wake_up()
        assert not await llm.is_sleeping()
        assert len((await joined(llm.generate(PROMPTS[0], LONG)))[0]) == 150

    for level in (1, 2):
        run(sleep_and_wake_up(level))


def test_a_sleeping_core_rejects_requests_of_other_front_ends(llm: AsyncLLM, run: Run) -> None:
    """A core that sleeps on one front end's request rejects requests of the others."""

    async def main() -> None:
        stream = await llm.add_request(PROMPTS[0], LONG)
        assert await llm._client.call(Sleep(1)) is None
        assert (await last(stream)).outputs[0].error == "The engine was put to sleep."
        refused = await last(llm.generate(PROMPTS[0], LONG, raise_on_error=False))
        assert "wake_up" in str(refused.outputs[0].error)
        with pytest.raises(RequestFailedError, match="wake_up") as caught:
            await last(llm.generate(PROMPTS[0], LONG))
        assert caught.value.outputs[0].outputs[0].finish_reason == "error"
        await llm.wake_up()
        assert len((await joined(llm.generate(PROMPTS[0], LONG)))[0]) == 150

    run(main())


def test_properties(llm: AsyncLLM, offline: LLM, run: Run) -> None:
    assert llm.is_running and not llm.errored and llm.dead_error is None
    assert repr(llm) == f"AsyncLLM({llm.model_config.model!r}, platform cpu, ready)"
    assert llm.model_config.max_model_len == offline.llm_engine.model_config.max_model_len == 176
    assert llm.cache_summary == offline.llm_engine.cache_summary
    assert llm.platform_summary == offline.llm_engine.platform_summary
    assert run(llm.get_tokenizer()) is llm.tokenizer.hf
    assert run(llm.tokenize("Hello world")) == llm.tokenizer.encode("Hello world")
    assert list(llm.start_seconds)[:3] == ["platform", "tokenizer", "start engine core"]
    run(llm.check_health())

    async def busy() -> None:
        stream = await llm.add_request(PROMPTS[0], LONG)
        await anext(stream)
        load = llm.load
        assert (load.num_requests, load.num_running, load.num_waiting) == (1, 1, 0) and 0 < load.kv_cache_usage < 1
        assert load.generation_tokens_per_second > 0
        stream.close()

    run(busy())


def test_metrics_of_several_front_ends_add_up(checkpoint: Path, run: Run) -> None:
    client = pytest.importorskip("prometheus_client")
    parser = pytest.importorskip("prometheus_client.parser")
    from mvllm.engine.metrics.prometheus import EngineCollector

    with async_engine(checkpoint, scheduling_policy="priority") as llm:

        async def some_requests() -> None:
            await asyncio.gather(
                *(last(llm.generate([5, 6, 7], params(output_kind=kind))) for kind in RequestOutputKind)
            )
            await last(llm.generate([5, 6, 7, 8], params(n=2, temperature=1.0), priority=3))
            await abort_by_break(llm, [5], LONG)
            await llm.reset_prefix_cache()  # the core has processed the abort by then

        run(some_requests())
        registry = client.CollectorRegistry()
        registry.register(EngineCollector(llm, model_name="m", prefixes=("mvllm:", "vllm:")))
        text = client.generate_latest(registry).decode()
        values = {
            sample.name + str(sorted((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }
    of = {name.removesuffix("[]"): value for name, value in values.items()}
    assert of["mvllm:prompt_tokens_total"] == of["vllm:prompt_tokens_total"] == 3 * 3 + 4 + 1
    assert of["mvllm:generation_tokens_total"] >= 5 * 20 + 1
    reason = "mvllm:request_success_total[('finished_reason', '{}')]"
    assert [of[reason.format(r)] for r in ("stop", "length", "abort", "error")] == [0, 5, 1, 0]
    assert of["mvllm:request_params_n_sum"] == 6 and of["mvllm:request_params_n_count"] == 5
    assert of["mvllm:time_to_first_token_seconds_count"] == 5
    assert of["mvllm:e2e_request_latency_seconds_count"] == 4  # the aborted request has no end-to-end latency
    assert 2 * 19 + 2 * 19 <= of["mvllm:inter_token_latency_seconds_count"] <= 2 * 19 + 2 * 19 + 150
    assert of["mvllm:request_generation_tokens_sum"] >= 5 * 20 + 1
    by_priority = "mvllm:{}_by_priority_seconds_count[('priority', '{}')]"
    for name, normal, low in (("time_to_first_token", 4, 1), ("e2e_request_latency", 3, 1)):
        assert [of[by_priority.format(name, each)] for each in ("high", "normal", "low")] == [0, normal, low]
    gaps = [of[by_priority.format("inter_token_latency", each)] for each in ("high", "normal", "low")]
    assert sum(gaps) == of["mvllm:inter_token_latency_seconds_count"] and gaps[2] <= 2 * 19 and not gaps[0]
    assert of["mvllm:num_requests_running"] == 0
    assert any(name.startswith("mvllm:cache_config_info") for name in of)


def test_a_line_is_logged_while_busy_and_none_while_idle(
    llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mvllm.engine.metrics.periodic_stats_log.INTERVAL_SECONDS", 0.05)
    llm._stats_log.close()

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if "generation" in r.getMessage()]

    async def work() -> None:
        earlier = llm.stats.num_generated_tokens
        stream = await llm.add_request(PROMPTS[0], params(max_tokens=150, output_kind=FINAL_ONLY))
        deadline = time.monotonic() + 120
        while (
            not lines() or llm.stats.num_generated_tokens == earlier
        ):  # although none of its tokens has been delivered
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        stream.close()
        await asyncio.sleep(0.2)
        caplog.clear()
        await asyncio.sleep(0.3)

    with caplog.at_level(logging.INFO, logger="mvllm"):
        logging.getLogger("mvllm").addHandler(caplog.handler)
        try:
            run(work())
        finally:
            logging.getLogger("mvllm").removeHandler(caplog.handler)
    assert not lines()
