"""Prompts with images, on disk and in another engine: blocks are found for the same image only; equal tokens."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, RequestOutput, SamplingParams
from mvllm_kv_transfer.remote.tcp import KEY_VARIABLE
from tests.engine.test_items_in_tiers import FAMILIES, check_encoder_runs, num_encoded, stats
from tests.helpers.multimodal_suite import BLOCK_SIZE, MultiModalOracle, check, check_hit, engine, generate, oracle

save_all = importlib.import_module("plugins.kv-transfer.tests.engine.test_prefill_decode").save_all
NUM_TOKENS = 16


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_a_restarted_engine_finds_the_blocks_of_the_same_image_only(name: str, tmp_path: Path) -> None:
    expected = oracle(name)
    settings: dict[str, Any] = {"kv_disk_cache": str(tmp_path)}
    if expected.entry.has_states:
        settings["state_snapshot_interval"] = BLOCK_SIZE
    first = (1, 7)
    with engine(expected.folder, **settings) as llm:
        check(expected, generate(llm, [expected.requests[index] for index in first]), first)
    start, _ = expected.span_of_image(1)
    with engine(expected.folder, **settings) as llm:
        for index in (5, 7, 1):  # that of another image, and those that were asked for before
            before = num_encoded(llm)
            (output,) = generate(llm, [expected.requests[index]])
            check(expected, [output], [index])
            hit = output.num_cached_tokens
            assert hit is not None
            length = len(expected.prompt_ids(expected.requests[index]))
            check_hit(expected, output, start if index == 5 else length - 1)
            assert index == 5 or expected.entry.has_states or hit > start
            check_encoder_runs(expected, llm, index, hit, before)
        assert stats(llm).kv_tiers["disk"].num_load_failures == 0


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a key of engines in tests, shared")


def start(stack: ExitStack, expected: MultiModalOracle, role: str, connector: str) -> LLM:
    transfer: dict[str, object] = {"kv_connector": connector, "kv_role": role}
    if connector == "tcp" and role == "consumer":
        transfer["kv_connector_extra_config"] = {"peers": ["127.0.0.1"]}
    settings: dict[str, object] = {"kv_transfer_config": transfer}
    if expected.entry.has_states:
        settings["state_snapshot_interval"] = BLOCK_SIZE
    return stack.enter_context(engine(expected.folder, **settings))


def run(llm: LLM, expected: MultiModalOracle, given: list[dict | None], num_tokens: int) -> list[RequestOutput]:
    """Greedy continuations of all requests; each has its own `kv_transfer_params`."""
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if each is None else {"kv_transfer_params": each},
        )
        for each in given
    ]
    return llm.generate([request.as_prompt() for request in expected.requests], sampling, use_tqdm=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("connector", ["shared_memory", "tcp"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_of_one_engine_are_continued_by_another(stack: ExitStack, name: str, connector: str) -> None:
    expected = oracle(name)
    producer, consumer = (start(stack, expected, role, connector) for role in ("producer", "consumer"))
    computed = run(producer, expected, [{"do_remote_decode": True}] * len(expected.requests), 1)
    save_all(producer)
    outputs = run(consumer, expected, [output.kv_transfer_params for output in computed], NUM_TOKENS)
    check(expected, outputs)
    needed = 0
    for index, output in enumerate(outputs):
        length = len(output.prompt_token_ids or ())
        check_hit(expected, output, length - 1)
        assert output.num_cached_tokens or expected.entry.has_states or length <= BLOCK_SIZE
        if index in (1, 5, 6, 7):
            needed += (output.num_cached_tokens or 0) < expected.span_of_image(index)[1]
    # The consumer's encoder computes images only whose ends are behind the blocks that it has fetched.
    assert num_encoded(producer) == 4
    if not expected.entry.has_states:
        assert num_encoded(consumer) <= needed + 2  # and those of the requests with several images
