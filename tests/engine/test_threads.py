"""One LLM called by several threads at once: shared steps, right outputs, and errors that stay in their call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, BeamSearchParams, RequestError, SamplingParams
from mvllm.entrypoints.step_loop import stream_request
from mvllm.errors import ConfigError, EngineDeadError, EngineSleepingError
from mvllm.messages.commands import IsSchedulerRunning
from tests.engine.conftest import MakeLLM
from tests.engine.test_async_scheduling import requests, visible_outputs
from tests.helpers.parity import engine
from tests.helpers.threads import SECONDS, run_in_threads

NUM_THREADS = 4
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["in-process", "core process"])
def shared(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, engine_core_process=request.param) as llm:
        yield llm
        check_idle(llm)


def check_idle(llm: LLM) -> None:
    assert not llm.llm_engine.has_unfinished_requests() and not llm.llm_engine.is_driven
    assert llm.reset_prefix_cache()  # no blocks are in use


def generate(llm: LLM, first: int, params: SamplingParams = LONG, **settings: Any) -> list[int]:
    [output] = llm.generate({"prompt_token_ids": [first, 20, 21]}, params, **{"use_tqdm": False, **settings})
    return list(output.outputs[0].token_ids)


@contextmanager
def calling(llm: LLM, *firsts: int, until_error: bool = True) -> Iterator[list[list[Any]]]:
    """Calls `generate` again and again in a thread for each first token, until an error, or else the end of the block.

    After the block, the list has the results of each thread, the error last.
    """
    stops, results = threading.Event(), list[list[Any]]()

    def call(first: int) -> list[Any]:
        found: list[Any] = []
        try:
            while not stops.is_set():
                found.append(generate(llm, first))
        except Exception as e:
            found.append(e)
        return found

    work = [lambda first=first: call(first) for first in firsts]
    runner = threading.Thread(target=lambda: results.extend(run_in_threads(*work)))
    runner.start()
    while not llm.llm_engine.load.num_requests and runner.is_alive():
        time.sleep(0.001)
    try:
        yield results
    finally:
        if not until_error:
            stops.set()
        runner.join(SECONDS)
        assert not runner.is_alive() and len(results) == len(firsts)


def errors(results: list[list[Any]]) -> list[type]:
    return [type(found[-1]) for found in results]


def check_outputs(results: list[list[Any]], expected: list[list[int]], *, whole: bool = True) -> None:
    """Asserts right outputs; a call that came while the engine was paused was refused."""
    for found, wanted in zip(results, expected, strict=True):
        if found and isinstance(found[-1], RequestError):
            assert "paused" in str(found.pop())
        assert all(tokens == wanted if whole else tokens == wanted[: len(tokens)] for tokens in found)


def test_requests_of_threads_run_in_the_same_steps(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = [generate(llm, first) for first in range(30, 30 + NUM_THREADS)]
    scheduler = llm.llm_engine._client._core.scheduler
    before, barrier = scheduler.next_step, threading.Barrier(NUM_THREADS)

    def work(first: int) -> list[int]:
        barrier.wait(SECONDS)
        return generate(llm, first)

    assert run_in_threads(*(lambda i=i: work(30 + i) for i in range(NUM_THREADS))) == expected
    assert scheduler.next_step - before < 2 * LONG.max_tokens


def test_a_request_need_not_wait_for_the_outputs_of_another_thread(
    shared: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a core process ends with the next outputs, which may be the last ones of a request."""
    processor, counts = shared.llm_engine._output_processor, list[int]()
    add = processor.add_request

    def count(request: Any) -> Any:
        found = add(request)
        counts.append(processor.num_requests)
        return found

    monkeypatch.setattr(processor, "add_request", count)
    run_in_threads(*(lambda i=i: [generate(shared, 30 + i) for _ in range(10)] for i in range(2)))
    assert counts.count(2) >= 5
    check_idle(shared)


def test_every_method_gives_each_thread_its_own_results(shared: LLM) -> None:
    llm = shared
    prompts, params = requests(seed=5)
    beams = BeamSearchParams(beam_width=3, max_tokens=6)

    def ask(i: int) -> list[Any]:
        ids = {"prompt_token_ids": [30 + i, 31, 32]}
        found: list[Any] = [visible_outputs(o) for o in llm.generate(prompts[i:7:4], params[i:7:4], use_tqdm=False)]
        found.append([list(sequence.tokens) for sequence in llm.beam_search(ids, beams)[0].sequences])
        streamed = stream_request(llm.llm_engine, ids, SHORT)
        found.append([token for output in streamed for token in output.outputs[0].token_ids])
        found.append([round(value, 3) for value in llm.embed(ids, use_tqdm=False)[0].outputs.embedding])
        found.append([round(output.outputs.score, 3) for output in llm.score(ids, [ids, prompts[i]], use_tqdm=False)])
        return found

    def look() -> None:
        for _ in range(5):
            names = {metric.name for metric in llm.get_metrics()}
            assert "mvllm:generation_tokens" in names
            llm.reset_prefix_cache()
            assert llm.llm_engine.load.num_requests >= 0 and llm.get_default_sampling_params() is not None
            assert not llm.is_paused() and not llm.llm_engine.is_sleeping

    expected = [ask(i) for i in range(4)]
    assert run_in_threads(*(lambda i=i: ask(i) for i in range(4)), look) == [*expected, None]
    check_idle(llm)


def test_the_profiler_records_steps_of_other_threads(
    shared: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MVLLM_TORCH_PROFILER_DIR", str(tmp_path))
    if not hasattr(shared.llm_engine._client, "_core"):
        with pytest.raises(ConfigError):
            shared.start_profile()
        return
    shared.start_profile()
    assert isinstance(run_in_threads(lambda: shared.start_profile())[0], RequestError)
    run_in_threads(lambda: generate(shared, 45, SHORT))
    [trace] = run_in_threads(shared.stop_profile)
    assert '"aten::' in trace.read_text()


def test_an_error_of_one_thread_ends_no_request_of_another(shared: LLM) -> None:
    llm = shared
    expected = generate(llm, 40)

    class Bar:
        def __init__(self, **settings: Any) -> None:
            pass

        def update(self, count: int) -> None:
            raise ArithmeticError("the bar")

        def close(self) -> None:
            pass

    def fail_in_the_bar() -> None:
        llm.generate([{"prompt_token_ids": [41]}, {"prompt_token_ids": [42]}], [SHORT, LONG], use_tqdm=Bar)

    def leave_a_stream() -> str:
        for _ in stream_request(llm.llm_engine, {"prompt_token_ids": [43]}, LONG):
            return "left"
        return "ended"

    work: list[Callable[[], Any]] = [
        lambda: generate(llm, 40),
        lambda: generate(llm, 1 << 30),
        fail_in_the_bar,
        leave_a_stream,
        lambda: generate(llm, 40),
    ]
    good, invalid, bar, left, also_good = run_in_threads(*work)
    assert good == also_good == expected and left == "left"
    assert isinstance(invalid, RequestError) and isinstance(bar, ArithmeticError)
    check_idle(llm)


@pytest.mark.parametrize("drives", [False, True], ids=["asleep", "driving"])
def test_ctrl_c_ends_the_call_of_the_main_thread_only(shared: LLM, drives: bool) -> None:
    llm, results = shared, list[list[int]]()
    expected = generate(llm, 50)

    def wait_for_requests(count: int) -> None:
        while llm.llm_engine.load.num_requests < count:
            time.sleep(0.001)

    def other() -> None:
        wait_for_requests(1 if drives else 0)
        interrupting.start()
        while not results or interrupting.is_alive():
            results.append(generate(llm, 50))

    def interrupt() -> None:
        wait_for_requests(2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting, generating = threading.Thread(target=interrupt), threading.Thread(target=other)
    with pytest.raises(KeyboardInterrupt):
        generating.start()
        if not drives:
            wait_for_requests(1)
        while generating.is_alive():
            generate(llm, 51)
    for thread in (interrupting, generating):
        thread.join(SECONDS)
    assert results and all(result == expected for result in results)
    check_idle(llm)


def test_an_aborted_request_ends_its_call(shared: LLM) -> None:
    llm_engine = shared.llm_engine
    with calling(shared, 60, 61) as results:
        while not results:  # both threads have ended
            llm_engine.abort_request([request.request_id for request in llm_engine._output_processor.requests])
            time.sleep(0.001)
    assert errors(results) == [RequestError] * 2 and all("aborted" in str(found[-1]) for found in results)
    check_idle(shared)


def test_sleep_ends_waiting_calls_with_an_error(shared: LLM) -> None:
    with calling(shared, 60, 61) as results:
        shared.sleep()
    assert errors(results) == [EngineSleepingError] * 2
    shared.wake_up()
    assert len(generate(shared, 60)) == LONG.max_tokens
    check_idle(shared)


def test_a_paused_engine_keeps_waiting_calls_until_it_resumes(shared: LLM) -> None:
    expected = [generate(shared, first) for first in (60, 61)]
    for mode in ("keep", "wait", "abort"):
        with calling(shared, 60, 61, until_error=False) as results:
            shared.pause_generation(mode=mode)
            assert shared.is_paused()
            time.sleep(0.02)
            shared.resume_generation()
        check_outputs(results, expected, whole=mode != "abort")
    check_idle(shared)


def test_a_pause_waits_for_a_stream_that_is_being_read(shared: LLM) -> None:
    read, paused = threading.Event(), threading.Event()

    def stream() -> int:
        count = 0
        for count, _ in enumerate(stream_request(shared.llm_engine, {"prompt_token_ids": [60]}, LONG), 1):
            if count == 1:
                read.set()
                while not paused.is_set() and shared.llm_engine.rollouts.call(IsSchedulerRunning()):
                    time.sleep(0.001)
                paused.wait(0.05)  # with an output at hand, and no call that runs steps
        return count

    def pause() -> bool:
        assert read.wait(SECONDS)
        shared.pause_generation(mode="wait")
        is_paused = shared.is_paused()
        paused.set()
        shared.resume_generation()
        return is_paused

    count, is_paused = run_in_threads(stream, pause)
    assert count > 1 and is_paused
    check_idle(shared)


def test_a_weight_update_runs_between_two_steps(shared: LLM, checkpoint: Path) -> None:
    expected = [generate(shared, first) for first in (60, 61)]
    with calling(shared, 60, 61, until_error=False) as results:
        for _ in range(2):
            shared.update_weights(path=checkpoint)
        shared.start_weight_update()
        shared.update_weights(path=checkpoint)
        shared.finish_weight_update(reset_running_requests=True)
    check_outputs(results, expected)
    check_idle(shared)


def test_requests_of_add_request_keep_their_outputs(shared: LLM) -> None:
    llm, own = shared, shared.llm_engine
    expected = generate(llm, 70, SHORT)
    own.add_request("mine", {"prompt_token_ids": [70, 20, 21]}, SHORT)
    assert run_in_threads(lambda: generate(llm, 70))[0][:8] == expected
    found: list[int] = []
    while own.has_unfinished_requests():
        for output in own.step():
            assert output.request_id == "mine"
            found = list(output.outputs[0].token_ids)
    assert found == expected
    check_idle(llm)


@pytest.mark.parametrize("in_process", [True, False], ids=["in-process", "core process"])
def test_close_ends_waiting_calls_with_an_error(checkpoint: Path, in_process: bool) -> None:
    with engine(checkpoint, engine_core_process=not in_process) as llm:
        with calling(llm, 60, 61) as results:
            llm.close()
        assert errors(results) == [EngineDeadError] * 2
        with pytest.raises(EngineDeadError, match="closed"):
            generate(llm, 60)


def test_a_step_that_fails_ends_every_call(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    with calling(llm, 60, 61) as results:
        monkeypatch.setattr(llm.llm_engine._client, "step", lambda: 1 / 0)
    assert errors(results) == [EngineDeadError] * 2
    assert all("division by zero" in str(found[-1]) for found in results)


def test_two_engines_run_in_two_threads(checkpoint: Path) -> None:
    with engine(checkpoint) as one, engine(checkpoint) as other:
        expected = [generate(one, first) for first in (80, 81)]
        for _ in range(3):
            assert run_in_threads(lambda: generate(one, 80), lambda: generate(other, 81)) == expected


def test_an_engine_outlives_the_thread_that_started_it(checkpoint: Path) -> None:
    opened = engine(checkpoint, engine_core_process=True)
    [llm] = run_in_threads(opened.__enter__)
    try:
        assert generate(llm, 90) == generate(llm, 90)
        with calling(llm, 91, 92) as results:  # calls that sleep notice the death of the core
            llm.pause_generation(mode="keep")
            os.kill(llm.llm_engine._client.core_pid, signal.SIGKILL)
        assert set(errors(results)) <= {EngineDeadError, RequestError}  # RequestError: called while it was paused
    finally:
        opened.__exit__(None, None, None)
