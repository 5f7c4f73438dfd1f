"""`LLM` behaves the same with its engine core in a separate process and in the caller's process."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from mvllm import LLM, SamplingParams
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.engine.process.launch import CoreChildProcess
from mvllm.engine.process.sync_mp_client import SyncMPClient
from mvllm.engine.process.zmq_channel import ClientChannel
from mvllm.entrypoints.step_loop import stream_request
from mvllm.errors import CacheError, EngineDeadError, RequestError
from mvllm.messages.commands import CheckHealth
from mvllm.messages.requests import EngineCoreRequest, FinishReason
from tests.helpers.parity import engine
from tests.helpers.processes import stop_process

PROMPTS = ["Hello world", "The capital of", [5, 6, 7, 8], "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, engine_core_process=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def inproc_llm(checkpoint: Path) -> Iterator[LLM]:
    with engine(checkpoint, engine_core_process=False) as llm:
        yield llm


def client_of(llm: LLM) -> SyncMPClient:
    client = llm.llm_engine._client
    assert isinstance(client, SyncMPClient)
    return client


def comparable(outputs: list[RequestOutput]) -> list[object]:
    return [
        (
            output.prompt,
            output.prompt_token_ids,
            output.prompt_logprobs,
            output.num_cached_tokens,
            [(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs],
        )
        for output in outputs
    ]


def test_outputs_are_the_same_to_the_last_logprob(llm: LLM, inproc_llm: LLM) -> None:
    assert llm.reset_prefix_cache() and inproc_llm.reset_prefix_cache()
    for _ in range(2):  # the second time with prefixes in the cache
        assert comparable(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == comparable(
            inproc_llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        )


def test_steps_return_the_same_outputs_in_the_same_order(llm: LLM, inproc_llm: LLM) -> None:
    pieces = [
        [o.outputs[0].token_ids for o in stream_request(each.llm_engine, PROMPTS[0], LONG)]
        for each in (llm, inproc_llm)
    ]
    assert pieces[0] == pieces[1] and len(pieces[0]) == 150


def test_engine_summaries_and_stats_are_the_same(llm: LLM, inproc_llm: LLM) -> None:
    for each in (llm, inproc_llm):
        each.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.llm_engine.cache_summary == inproc_llm.llm_engine.cache_summary
    assert llm.llm_engine.platform_summary == inproc_llm.llm_engine.platform_summary
    stats = llm.llm_engine.stats
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    phases = ["start workers", "load model", "size KV cache", "allocate KV cache"]
    assert list(client_of(llm).start_seconds) == ["start engine core", *phases]
    assert list(llm.llm_engine.start_seconds) == ["platform", "tokenizer", "start engine core", *phases, "first token"]
    assert list(inproc_llm.llm_engine.start_seconds) == ["platform", "tokenizer", *phases, "first token"]
    assert all(seconds >= 0 for seconds in llm.llm_engine.start_seconds.values())
    assert llm.llm_engine.step() == []  # without requests, it does not wait
    client_of(llm).call(CheckHealth())


def test_after_an_abort_the_prefix_cache_can_be_reset_at_once(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", PROMPTS[2], LONG)
    engine.step()
    engine.abort_request("a")
    assert engine.reset_prefix_cache()
    assert engine.step() == [] and not engine.has_unfinished_requests()


def test_a_request_that_the_core_cannot_decode_fails_alone(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    client = client_of(llm)
    for request_id, ids in (("unreadable", ["five", 6]), ("good", PROMPTS[2])):
        client.add_request(
            EngineCoreRequest(request_id=request_id, prompt_token_ids=ids, sampling_params=GREEDY)  # type: ignore
        )
    tokens: dict[str, list[int]] = {"unreadable": [], "good": []}
    reasons = {}
    while client.has_requests():
        for output in client.step().outputs:
            tokens[output.request_id] += output.new_token_ids
            reasons[output.request_id] = output.finish_reason
            assert output.request_id == "good" or "cannot take this request" in (output.error or "")
    assert reasons == {"unreadable": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert tokens == {"unreadable": [], "good": expected}


def test_a_refused_request_never_reaches_the_core(llm: LLM) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        llm.generate([PROMPTS[2], [5, 100_000]], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    assert not client_of(llm).has_requests()


def test_random_bytes_on_its_sockets_are_dropped(llm: LLM) -> None:
    address = client_of(llm)._channel.address
    context = zmq.Context()
    strangers = [context.socket(kind) for kind in (zmq.PUSH, zmq.DEALER)]
    for stranger, to in zip(strangers, (address.updates, address.commands)):
        stranger.connect(to)
        for size in (0, 1, 32, 40, 4096):
            stranger.send_multipart([os.urandom(size), os.urandom(size)])
            stranger.send(os.urandom(size))
    for to in (address.updates, address.commands):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(to.removeprefix("ipc://").replace("@", "\0", 1))
            raw.sendall(os.urandom(1000))
    assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == [20] * 4
    for stranger in strangers:
        stranger.close(0)
    context.term()


def test_ctrl_c_takes_effect_at_once_and_leaves_a_usable_engine(llm: LLM) -> None:
    expected = comparable(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    core = psutil.Process(client_of(llm).core_pid)
    stop_process(core.pid)  # no step ends before the interrupt
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    finally:
        timer.join()
        core.resume()
    assert signal.getsignal(signal.SIGINT) is before
    assert not llm.llm_engine.has_unfinished_requests()
    assert comparable(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_an_idle_engine_core_sleeps(llm: LLM) -> None:
    core = psutil.Process(client_of(llm).core_pid)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    def used() -> tuple[float, int]:
        times = core.cpu_times()
        threads = [path.read_text() for path in Path(f"/proc/{core.pid}/task").glob("*/status")]
        return times.user + times.system, sum(int(re.findall(r"^voluntary\D+(\d+)", t, re.M)[0]) for t in threads)

    for _ in range(10):  # on a busy machine it may take a while until it waits
        (cpu, switches) = used()
        for _ in range(2):
            time.sleep(1.0)
        (cpu_after, switches_after) = used()
        if cpu_after - cpu <= 0.02 and switches_after - switches <= 4:  # two ticks of the kernel's clock; no polling
            return
    pytest.fail(f"in 2 s it used {cpu_after - cpu} s, and was switched to {switches_after - switches} times")


def test_a_startup_error_is_the_error_of_the_core_and_no_process_is_left(checkpoint: Path) -> None:
    children = set(psutil.Process().children())
    with pytest.raises(CacheError, match=r"max_model_len .* needs .* of KV cache") as caught:
        LLM(str(checkpoint), engine_core_process=True, kv_cache_memory_bytes=1000, use_tqdm_on_load=False)
    trace = str(caught.value.__cause__)
    assert "In EngineCore (pid " in trace and "during size KV cache" in trace and "size_kv_cache" in trace
    assert set(psutil.Process().children()) <= children


def test_another_process_that_connects_first_cannot_impersonate_the_core(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = CoreChildProcess.launch
    context = zmq.Context()
    channels: list[ClientChannel] = []
    opened = ClientChannel.__init__
    monkeypatch.setattr(
        ClientChannel, "__init__", lambda self, address: (opened(self, address), channels.append(self))[0]
    )

    def connect_first(process: CoreChildProcess) -> None:
        for name in (b"core-0", b"core-1", b"EngineCore"):
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.ROUTING_ID, name)
            stranger.connect(channels[0].address.commands)
            stranger.send(b"let me in")
        time.sleep(0.5)
        launch(process)

    monkeypatch.setattr(CoreChildProcess, "launch", connect_first)
    try:
        with engine(checkpoint, engine_core_process=True, step_timeout=60) as llm:
            assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False)
    finally:
        context.destroy(linger=0)


def test_using_a_closed_engine_is_an_error_and_its_process_has_ended(checkpoint: Path) -> None:
    with engine(checkpoint, engine_core_process=True) as llm:
        core = psutil.Process(client_of(llm).core_pid)
        held, client = llm.llm_engine, client_of(llm)
        llm.close()
        llm.close()
        assert not core.is_running()
        for use in (
            lambda: llm.generate("x"),
            lambda: held.step(),
            client.step,
            lambda: client.call(CheckHealth()),
        ):
            with pytest.raises(EngineDeadError, match=r"closed|shut down"):
                use()
        client.abort_requests(["a"])
        held.wake()
