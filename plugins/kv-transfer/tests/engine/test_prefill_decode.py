"""Prompts that one engine computes and another continues: every token equals that of transformers, whatever fails."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, RequestOutput, SamplingParams
from mvllm.engine.process.inproc_client import InprocClient
from mvllm.engine.process.sync_mp_client import SyncMPClient
from mvllm_kv_transfer.remote.tcp import KEY_VARIABLE
from tests.engine.test_mtp import check_both_drafts, mtp, recorded_logits, reference
from tests.engine.test_speculative import THREADS, draw
from tests.helpers import parity
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.parity import BLOCK_SIZE, Oracle
from tests.helpers.processes import TAG, assert_nothing_left, new_tag, shared_memory_names, stop_process

NAME = "llama-gqa"
NUM_TOKENS = 16
FAMILIES = [
    "mistral-window",  # sliding windows in all layers
    "qwen2-layer-types",  # in some layers: several groups
    "gemma3",
    "gptoss",
    "qwen3moe",
    "deepseek3",  # MLA
    "deepseek32",  # MLA with an indexer
    "mamba2",  # states only
    "bamba",  # states beside keys and values
    "falconh1",
    "qwen3next",  # delta rule
    "kimilinear",  # delta rule and MLA
    "lfm2",  # short convolutions
]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a key of engines in tests, shared")


def start(stack: ExitStack, folder: Path, role: str, connector: str = "shared_memory", **settings: Any) -> LLM:
    options = settings.pop("options", {"peers": ["127.0.0.1"]} if connector == "tcp" and role != "producer" else {})
    transfer = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": options}
    defaults = {"max_num_batched_tokens": 48, "kv_transfer_config": transfer}
    return stack.enter_context(parity.engine(folder, **(defaults | settings)))


def run(
    llm: LLM, prompts: list[list[int]], params: list[dict[str, Any] | None], num_tokens: int
) -> list[RequestOutput]:
    """Greedy continuations with log-probabilities; each request has its own `kv_transfer_params`."""
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
            extra_args=None if each is None else {"kv_transfer_params": each},
        )
        for each in params
    ]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def prefill(llm: LLM, prompts: list[list[int]]) -> list[dict[str, Any] | None]:
    """Has a producer compute prompts. Returns the params for the consumer."""
    outputs = run(llm, prompts, [{"do_remote_decode": True}] * len(prompts), 1)
    save_all(llm)
    return [output.kv_transfer_params for output in outputs]


def save_all(llm: LLM) -> None:
    """An engine core in a process of its own saves while it is idle; one in this process does when it is asked to."""
    client = llm.llm_engine._client
    while isinstance(client, InprocClient) and client.has_requests():
        client.step()


def core_pid(llm: LLM) -> int:
    client = llm.llm_engine._client
    assert isinstance(client, SyncMPClient)
    return client.core_pid


def check(expected: Oracle, outputs: list[RequestOutput], which: list[int] | None = None) -> None:
    parity.check(expected, outputs, which)


def assert_transferred(expected: Oracle, outputs: list[RequestOutput]) -> None:
    """Every whole block before a prompt's last token came from the other engine."""
    for prompt, output in zip(expected.prompts, outputs, strict=True):
        assert output.num_cached_tokens >= (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE, len(prompt)


@pytest.fixture(scope="module")
def expected() -> Oracle:
    return parity.oracle(NAME, (3, 6, 10, 11), NUM_TOKENS)


def test_prompts_of_one_engine_are_continued_by_another(stack: ExitStack, expected: Oracle) -> None:
    producer = start(stack, expected.folder, "producer", kv_transfer_config=None, kv_role="producer")
    consumer = start(stack, expected.folder, "consumer", "shared_memory")
    params = prefill(producer, expected.prompts)
    outputs = run(consumer, expected.prompts, params, NUM_TOKENS)
    check(expected, outputs)
    assert_transferred(expected, outputs)
    assert outputs[0].kv_transfer_params is None
    assert params[0] is None, "a prompt of less than a block has nothing to transfer"


@pytest.mark.parametrize("name", ["mimo", pytest.param("qwen35moe", marks=pytest.mark.exhaustive)])
def test_a_draft_module_gets_its_keys_and_values_of_the_prompt(
    stack: ExitStack, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are those of a module that has read the whole prompt. The producer may draft fewer tokens."""
    expected, prompt, num_blocks = reference(name), draw(random.Random(3), 44), 2
    producer = start(stack, expected.folder, "producer", state_snapshot_interval=16, **mtp(1))
    consumer = start(stack, expected.folder, "consumer", state_snapshot_interval=16, **mtp(2))
    params = prefill(producer, [prompt])
    with recorded_logits(monkeypatch) as found:
        [output] = run(consumer, [prompt], params, NUM_TOKENS)
    tokens = list(output.outputs[0].token_ids)
    assert tokens == expected.greedy_after([*prompt, *tokens], len(prompt))
    assert output.num_cached_tokens == num_blocks * BLOCK_SIZE
    check_both_drafts(found, expected, [*prompt, *tokens])


@pytest.mark.exhaustive
@pytest.mark.parametrize("connector", ["tcp", "shared_memory"])
@pytest.mark.parametrize("name", [NAME, *FAMILIES])
def test_families(stack: ExitStack, name: str, connector: str) -> None:
    expected = parity.oracle(name, num_tokens=NUM_TOKENS)
    producer = start(stack, expected.folder, "producer", connector)
    consumer = start(stack, expected.folder, "consumer", connector)
    params = prefill(producer, expected.prompts)
    outputs = run(consumer, expected.prompts, params, NUM_TOKENS)
    check(expected, outputs)
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[11] >= 64, cached  # of 97 tokens; states are kept at fewer places than blocks
    check(expected, run(consumer, expected.prompts, [None] * len(params), NUM_TOKENS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [NAME, "bamba", "qwen2-layer-types"])
@pytest.mark.parametrize("settings", [{"async_scheduling": False}, {"kv_cache_memory_bytes": 2**19, "max_num_seqs": 3}])
def test_steps_and_memory_change_no_token(stack: ExitStack, name: str, settings: dict[str, Any]) -> None:
    expected = parity.oracle(name, num_tokens=NUM_TOKENS)
    producer = start(stack, expected.folder, "producer", "tcp", **settings)
    consumer = start(stack, expected.folder, "consumer", "tcp", **settings)
    params = prefill(producer, expected.prompts)
    check(expected, run(consumer, expected.prompts, params, NUM_TOKENS))


@pytest.mark.exhaustive
def test_an_engine_with_other_weights_computes_the_prompt(
    stack: ExitStack, expected: Oracle, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = make_checkpoint("llama-theta", tmp_path / "other")
    producer = start(stack, other, "producer")
    consumer = start(stack, expected.folder, "consumer")
    params = prefill(producer, expected.prompts)
    outputs = run(consumer, expected.prompts, params, NUM_TOKENS)
    check(expected, outputs)
    assert not any(output.num_cached_tokens for output in outputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_request_id": 1}])
def test_invalid_params_are_computed(stack: ExitStack, expected: Oracle, params: dict[str, Any]) -> None:
    consumer = start(stack, expected.folder, "consumer")
    check(expected, run(consumer, expected.prompts, [params] * len(expected.prompts), NUM_TOKENS))


@pytest.mark.exhaustive
def test_requests_that_are_aborted_while_they_wait_leave_nothing(stack: ExitStack, expected: Oracle) -> None:
    producer = start(stack, expected.folder, "producer", engine_core_process=True)
    consumer = start(stack, expected.folder, "consumer")
    for _ in range(3):
        params = prefill(producer, expected.prompts)
        for number, (prompt, each) in enumerate(zip(expected.prompts, params, strict=True)):
            extra = {} if each is None else {"kv_transfer_params": each}
            sampling = SamplingParams(temperature=0, max_tokens=9, detokenize=False, extra_args=extra)
            consumer.llm_engine.add_request(f"a{number}", {"prompt_token_ids": prompt}, sampling)
        for _ in range(2):
            consumer.llm_engine.step()
        consumer.llm_engine.abort_request([f"a{number}" for number in range(len(params))])
        while consumer.llm_engine.has_unfinished_requests():
            consumer.llm_engine.step()
    params = prefill(producer, expected.prompts)
    check(expected, run(consumer, expected.prompts, params, NUM_TOKENS))
    stats = consumer.llm_engine.stats
    assert stats is not None and stats.num_waiting_for_kv == 0 and stats.kv_cache_usage == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("connector", ["tcp", "shared_memory"])
@pytest.mark.parametrize("phase", ["before", "during", "after"])
def test_a_producer_that_is_killed_costs_only_time(
    stack: ExitStack, expected: Oracle, connector: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, before = new_tag(), shared_memory_names()
    monkeypatch.setenv(TAG, tag)
    producer = start(stack, expected.folder, "producer", connector, engine_core_process=True)
    monkeypatch.delenv(TAG)
    options = {"lookup_seconds": 5.0, "step_seconds": 3.0, "transfer_seconds": 5.0}
    consumer = start(stack, expected.folder, "consumer", connector, options=options)
    params = prefill(producer, expected.prompts)
    pid = core_pid(producer)
    if phase == "before":
        os.kill(pid, signal.SIGKILL)
    elif phase == "during":
        stop_process(pid)
    started = time.monotonic()
    outputs = run(consumer, expected.prompts, params, NUM_TOKENS)
    assert time.monotonic() - started < 100
    check(expected, outputs)
    assert any(output.num_cached_tokens for output in outputs) == (phase == "after")
    if phase != "before":
        os.kill(pid, signal.SIGKILL)
    check(expected, run(consumer, expected.prompts, [None] * len(params), NUM_TOKENS))
    producer.close()
    assert_nothing_left(tag, before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("connector", ["tcp", "shared_memory"])
def test_a_consumer_that_is_killed_leaves_the_producer_as_it_was(
    stack: ExitStack, expected: Oracle, connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag, before = new_tag(), shared_memory_names()
    producer = start(
        stack, expected.folder, "producer", connector, engine_core_process=True, options={"hold_seconds": 1.0}
    )
    monkeypatch.setenv(TAG, tag)
    consumer = start(stack, expected.folder, "consumer", connector, engine_core_process=True)
    monkeypatch.delenv(TAG)
    params = prefill(producer, expected.prompts)
    check(expected, run(consumer, expected.prompts, params, NUM_TOKENS))
    prefill(producer, expected.prompts)
    pid = core_pid(consumer)
    os.kill(pid, signal.SIGKILL)
    consumer.close()
    assert_nothing_left(tag, before | shared_memory_names())
    again = start(stack, expected.folder, "consumer", connector)
    params = prefill(producer, expected.prompts)
    check(expected, run(again, expected.prompts, params, NUM_TOKENS))


RANKS = [
    pytest.param({"tensor_parallel_size": 2}, id="tensor"),
    pytest.param({"pipeline_parallel_size": 2}, id="pipeline", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("ranks", RANKS)
def test_engines_of_several_ranks_transfer_the_parts_of_each(
    stack: ExitStack, expected: Oracle, ranks: dict[str, int]
) -> None:
    settings = {**ranks, "distributed_executor_backend": THREADS}
    producer = start(stack, expected.folder, "producer", **settings)
    consumer = start(stack, expected.folder, "consumer", **settings)
    params = prefill(producer, expected.prompts)
    outputs = run(consumer, expected.prompts, params, NUM_TOKENS)
    check(expected, outputs)
    assert_transferred(expected, outputs)
    # A consumer of one rank has other bytes in its blocks: it says so, and computes the prompts.
    alone = start(stack, expected.folder, "consumer")
    outputs = run(alone, expected.prompts, prefill(producer, expected.prompts), NUM_TOKENS)
    check(expected, outputs)
    assert not any(output.num_cached_tokens for output in outputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("connector", ["tcp", "shared_memory"])
@pytest.mark.parametrize("name", [NAME, "gemma3", "bamba"])
def test_ranks_in_processes(stack: ExitStack, name: str, connector: str) -> None:
    expected = parity.oracle(name, num_tokens=NUM_TOKENS)
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    producer = start(stack, expected.folder, "producer", connector, **settings)
    consumer = start(stack, expected.folder, "consumer", connector, **settings)
    params = prefill(producer, expected.prompts)
    outputs = run(consumer, expected.prompts, params, NUM_TOKENS)
    check(expected, outputs)
    assert (outputs[11].num_cached_tokens or 0) >= 64
