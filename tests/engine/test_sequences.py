"""Requests for several sequences, and the guarantees of a seed, in a whole engine."""

from __future__ import annotations

import re

import pytest

from mvllm import LLM, RequestError, SamplingParams
from tests.engine.conftest import MakeLLM

PROMPT = {"prompt_token_ids": [2 + i * 7 % 300 for i in range(70)]}
OTHERS = [{"prompt_token_ids": [3 + i * k % 300 for i in range(5 * k)]} for k in range(1, 9)]


def tokens_of(llm: LLM, prompts: list, params: SamplingParams | list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_sequences_of_one_prompt_share_its_blocks(make_llm: MakeLLM, enable_prefix_caching: bool) -> None:
    llm = make_llm(enable_prefix_caching=enable_prefix_caching)
    engine = llm.llm_engine
    engine.add_request("several", PROMPT, SamplingParams(n=8, temperature=1.0, max_tokens=4, ignore_eos=True))
    engine.step()
    engine.step()
    stats, num_blocks = engine.stats, engine.cache_summary.num_blocks
    assert stats is not None and stats.num_running == 8
    # 70 tokens: 4 full blocks that all share, and one block of its own for each.
    assert round(stats.kv_cache_usage * num_blocks) == 4 + 8


def test_without_prefix_caching_different_requests_share_no_blocks(make_llm: MakeLLM) -> None:
    llm = make_llm(enable_prefix_caching=False)
    engine = llm.llm_engine
    for i in range(3):
        engine.add_request(str(i), PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    stats = engine.stats
    assert stats is not None
    assert round(stats.kv_cache_usage * engine.cache_summary.num_blocks) == 3 * 5


def test_each_sequence_gets_its_index_and_tokens_of_its_own(make_llm: MakeLLM) -> None:
    params = SamplingParams(n=6, temperature=1.5, max_tokens=24, ignore_eos=True, seed=5, logprobs=0)
    output = make_llm().generate(PROMPT, params, use_tqdm=False)[0]
    assert [sequence.index for sequence in output.outputs] == list(range(6))
    assert len({tuple(sequence.token_ids) for sequence in output.outputs}) == 6
    for sequence in output.outputs:
        assert sequence.logprobs is not None and sequence.finish_reason == "length"
        total = sum(entries[t].logprob for t, entries in zip(sequence.token_ids, sequence.logprobs, strict=True))
        assert sequence.cumulative_logprob == pytest.approx(total)


def test_a_seed_gives_the_same_tokens_alone_in_any_batch_and_after_preemption(make_llm: MakeLLM) -> None:
    seeded = SamplingParams(temperature=1.2, top_p=0.9, max_tokens=40, ignore_eos=True, seed=42)
    unseeded = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    alone = tokens_of(make_llm(), [PROMPT], seeded)[0]
    for llm in (make_llm(), make_llm(max_num_batched_tokens=16), make_llm(kv_cache_memory_bytes=22 * 16 * 768)):
        mixed = tokens_of(llm, [*OTHERS[:4], PROMPT, *OTHERS[4:]], [unseeded] * 4 + [seeded] + [unseeded] * 4)
        assert mixed[4] == alone
    stats = llm.llm_engine.stats
    assert stats is not None and stats.num_preemptions > 0


def test_without_a_seed_two_equal_requests_differ(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True)
    first, second = tokens_of(make_llm(), [PROMPT, PROMPT], params)
    assert first != second


def test_engines_without_a_seed_sample_differently_and_the_logged_seed_repeats_one(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=30, ignore_eos=True, seed=None)
    with caplog.at_level("INFO", logger="mvllm"):
        first, second = (tokens_of(make_llm(seed=None), [PROMPT], params) for _ in range(2))
    assert first != second
    logged = re.findall(r"seed = (\d+): drawn", caplog.text)
    assert len(logged) == 2
    repeating = make_llm(seed=int(logged[1]))
    repeating.llm_engine.add_request("a name that a server draws at random", PROMPT, params)
    outputs = []
    while repeating.llm_engine.has_unfinished_requests():
        outputs += repeating.llm_engine.step()
    assert [[list(sequence.token_ids) for sequence in outputs[-1].outputs]] == second


def test_greedy_requests_for_several_sequences_are_refused() -> None:
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(n=2, temperature=0)
