"""Layers with sliding windows free their blocks while a request runs, and every token equals that of transformers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from mvllm import LLM, SamplingParams
from tests.helpers import parity
from tests.helpers.parity import BLOCK_SIZE, NUM_TOKENS

ALL_LAYERS = "mistral-window"  # three layers with a window of 11 tokens
WIDE_WINDOW = "mistral-window-yarn"  # window of 24 tokens
SOME_LAYERS = "qwen2-layer-types"  # two of three layers have a window of 9 tokens: three groups of one
LONG = [10, 11, 14, 15]  # prompts of 64, 97, 40 and 48 tokens


def make(stack: ExitStack, name: str, num_blocks: int, **settings: object) -> LLM:
    """An engine with `num_blocks` blocks."""
    folder = parity.oracle(name).folder
    with parity.engine(folder) as llm:
        size = parity.bytes_of_blocks(llm, num_blocks)
    return stack.enter_context(parity.engine(folder, kv_cache_memory_bytes=size, **settings))


def blocks_in_use(llm: LLM, prompt: list[int]) -> list[int]:
    """The number of blocks in use after each step of a request, including the last."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    engine.add_request("watched", {"prompt_token_ids": prompt}, params)
    used = []
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.stats is not None
        used.append(round(engine.stats.kv_cache_usage * engine.cache_summary.num_blocks))
    return used


def test_three_blocks_suffice_for_sequences_of_eleven_blocks(stack: ExitStack) -> None:
    llm = make(stack, ALL_LAYERS, 3, max_num_batched_tokens=16)
    summary = llm.llm_engine.cache_summary
    assert (summary.num_blocks, summary.blocks_per_request, summary.num_tokens) == (3, 3, 176)
    expected = parity.oracle(ALL_LAYERS)
    parity.check(expected, parity.generate(llm, [expected.prompts[i] for i in LONG]), LONG)
    used = blocks_in_use(llm, expected.prompts[11])
    assert max(used) == 3 and used[-1] == 0
    assert max(used[30:]) == 2  # 11 tokens that do not fit one block


@pytest.mark.parametrize("asynchronous", [False, True])
def test_layers_with_windows_keep_only_the_blocks_of_their_window(stack: ExitStack, asynchronous: bool) -> None:
    llm = make(stack, SOME_LAYERS, 40, max_num_batched_tokens=16, async_scheduling=asynchronous)
    assert llm.llm_engine.cache_summary.windows == (None, 9, 9)
    expected = parity.oracle(SOME_LAYERS)
    used = blocks_in_use(llm, expected.prompts[11])
    assert used[0] == 7 + 2 * 3  # 97 tokens, and the blocks of 8 previous tokens and a step of 16
    assert max(used[30:-1]) == used[-3] == 10 + 2 * 2  # 160 tokens, and 9 tokens that do not fit one block
    assert used[-1] == 0


@pytest.mark.parametrize("name", [SOME_LAYERS, WIDE_WINDOW])
@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_tight_cache_changes_no_token(stack: ExitStack, name: str, asynchronous: bool) -> None:
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 8, "async_scheduling": asynchronous}
    llm = make(stack, name, 24 if name == SOME_LAYERS else 6, **settings)
    expected = parity.oracle(name)
    for _ in range(2):
        parity.check(expected, parity.generate(llm, expected.prompts))
    stats = llm.llm_engine.stats
    assert stats is not None and stats.num_preemptions > 0 and stats.kv_cache_usage == 0


@pytest.mark.parametrize("name", [SOME_LAYERS, ALL_LAYERS])
def test_prefixes_are_cached_after_the_windows_have_moved_on(stack: ExitStack, name: str) -> None:
    llm = make(stack, name, 300, max_num_batched_tokens=16, max_num_seqs=4)
    expected = parity.oracle(name)
    prompts = [expected.prompts[i] for i in LONG]
    first = parity.generate(llm, prompts)
    parity.check(expected, first, LONG)
    # The next turn of a conversation continues the whole previous turn.
    longer = [prompt + list(output.outputs[0].token_ids)[:40] for prompt, output in zip(prompts, first, strict=True)]
    outputs = parity.generate(llm, longer, max_tokens=NUM_TOKENS - 40)
    for i, prompt, output in zip(LONG, longer, outputs, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert list(output.outputs[0].token_ids) == expected.tokens[i][40:]


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_the_groups_are_restored(stack: ExitStack, level: int) -> None:
    llm = make(stack, SOME_LAYERS, 60, max_num_batched_tokens=32)
    expected = parity.oracle(SOME_LAYERS)
    prompts = [expected.prompts[i] for i in LONG]
    parity.check(expected, parity.generate(llm, prompts), LONG)
    llm.sleep(level)
    llm.wake_up()
    parity.check(expected, parity.generate(llm, prompts), LONG)


@pytest.mark.exhaustive
@pytest.mark.parametrize("parallel", ["pipeline_parallel_size", "tensor_parallel_size"])
@pytest.mark.parametrize("name", [SOME_LAYERS, WIDE_WINDOW])
def test_stages_and_shards_give_the_same_tokens(stack: ExitStack, name: str, parallel: str) -> None:
    llm = make(stack, name, 40, max_num_batched_tokens=24, **{parallel: 2})
    expected = parity.oracle(name)
    for _ in range(2):
        parity.check(expected, parity.generate(llm, expected.prompts))
