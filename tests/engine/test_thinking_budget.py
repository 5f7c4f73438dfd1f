"""Thinking budgets in the engine: exactly so many tokens, then the forced end, then what the model says after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mvllm import LLM, RequestError, SamplingParams
from tests.engine.conftest import MakeLLM
from tests.engine.test_tokens_on_device import log, make  # noqa: F401  (fixtures)
from tests.helpers.parity import bytes_of_blocks, engine

END = [9, 11]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
PROMPTS = [[5 + i, 6, 7, 8] * (3 + i) for i in range(6)]
BUDGETS = [0, 1, 5, 12, 30, 200]
MAX_TOKENS = 44


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs]


def greedy(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    params = [SamplingParams(**GREEDY, max_tokens=length) for length in lengths]
    return [sequences[0] for sequences in run(llm, prompts, params)]


def limited(
    budget: int,
    *,
    starts: Sequence[list[int]] = (),
    ends: Sequence[list[int]] = (END,),
    implicit_ends: Sequence[list[int]] = (),
    **more: Any,
) -> SamplingParams:
    tokens = {"starts": starts, "ends": ends, "forced": END, "implicit_ends": implicit_ends}
    settings = {**GREEDY, "max_tokens": MAX_TOKENS, "thinking_token_budget": budget, **more}
    return SamplingParams(**settings, thinking_tokens=tokens)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The thoughts of the unlimited model, the end, and what the model says after a prompt with both."""
    with engine(checkpoint) as llm:
        thoughts = [free[:budget] for free, budget in zip(greedy(llm, PROMPTS, [MAX_TOKENS] * 6), BUDGETS, strict=True)]
        known = [tokens + END if len(tokens) < MAX_TOKENS else tokens for tokens in thoughts]
        room = [MAX_TOKENS - len(tokens) for tokens in known]
        rest = greedy(llm, [a + b for a, b in zip(PROMPTS, known, strict=True)], [max(1, n) for n in room])
        return [a + b[:n] for a, b, n in zip(known, rest, room, strict=True)]


SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "async, chunks of 16 tokens": {"async_scheduling": True, "max_num_batched_tokens": 16},
    "draft tokens": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_budget_is_exact_and_the_model_goes_on_after_the_end(
    make_llm: MakeLLM, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    llm = make_llm(**settings)
    outputs = run(llm, PROMPTS, [limited(budget) for budget in BUDGETS])
    assert [sequences[0] for sequences in outputs] == expected


def test_preempted_requests_keep_their_budgets(make_llm: MakeLLM, expected: list[list[int]]) -> None:
    size = bytes_of_blocks(make_llm(), 10)
    llm = make_llm(kv_cache_memory_bytes=size, max_model_len=112, async_scheduling=True)
    outputs = run(llm, PROMPTS, [limited(budget) for budget in BUDGETS])
    assert [sequences[0] for sequences in outputs] == expected
    stats = llm.llm_engine.stats
    assert stats is not None and stats.num_preemptions > 0


def test_with_tokens_on_the_device(make: Callable[..., LLM], expected: list[list[int]]) -> None:  # noqa: F811
    outputs = run(make(), PROMPTS, [limited(budget) for budget in BUDGETS])
    assert [sequences[0] for sequences in outputs] == expected


def test_thoughts_that_end_in_time_or_never_begin_are_not_cut(make_llm: MakeLLM) -> None:
    llm = make_llm()
    [free] = greedy(llm, PROMPTS[:1], [MAX_TOKENS])
    in_time = limited(20, ends=[free[8:10]])
    by_a_call = limited(20, implicit_ends=[[3, 3, 3], free[8:10]])
    not_begun = limited(0, starts=[[3, 3, 3]])
    assert run(llm, PROMPTS[:1] * 3, [in_time, by_a_call, not_begun]) == [[free]] * 3
    begun = limited(4, starts=[free[1:3]])  # behind one token, like white space
    rest = greedy(llm, [PROMPTS[0] + free[:7] + END], [MAX_TOKENS - 9])
    assert run(llm, PROMPTS[:1], [begun]) == [[free[:7] + END + rest[0]]]
    half = limited(9, ends=[[*free[7:9], 13]])  # the closing tag has begun when the budget is spent
    assert run(llm, PROMPTS[:1], [half])[0][0][:10] == [*free[:9], 13]
    half_a_call = limited(9, implicit_ends=[[*free[7:9], 13]])
    assert run(llm, PROMPTS[:1], [half_a_call])[0][0][:11] == [*free[:9], *END]


def test_each_sequence_of_n_has_the_budget_also_with_log_probabilities_and_bans(make_llm: MakeLLM) -> None:
    params = limited(6, temperature=1.0, seed=3, n=3, logprobs=1, bad_words_token_ids=[[9]], min_tokens=20)
    [sequences] = run(make_llm(), PROMPTS[:1], [params])
    assert len({tuple(tokens[:6]) for tokens in sequences}) > 1
    assert all(tokens[6:8] == END and 9 not in tokens[:6] + tokens[8:] for tokens in sequences)


def test_tags_of_a_text_model(make_llm: MakeLLM) -> None:
    llm = make_llm(model="demo", max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=30, thinking_token_budget=7, thinking_tags=["<a>", "</a>"])
    tokenizer = llm.get_tokenizer()
    end = tokenizer.encode("</a>", add_special_tokens=False)

    def tokens(prompt: str, params: SamplingParams) -> list[int]:
        return list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)

    opened = tokens("Once upon <a>\n", params)
    assert opened[7 : 7 + len(end)] == end
    within = tokens("Once upon <a> a time there was", params)
    assert within[7 : 7 + len(end)] == end
    free = SamplingParams(temperature=0, max_tokens=30)
    for prompt in ("Once upon <a>b</a>\n", "Once upon", "<a>b</a> Once upon"):  # closed, or not begun
        assert tokens(prompt, params) == tokens(prompt, free)
    with pytest.raises(RequestError, match="thinking_tags"):
        SamplingParams(thinking_tags=["<a>"])
    with pytest.raises(RequestError, match="use_beam_search"):
        SamplingParams(use_beam_search=True, temperature=0, thinking_token_budget=1)


def test_a_constraint_applies_after_the_forced_end_also_inside_of_a_draft(make_llm: MakeLLM) -> None:
    """The second prompt has thoughts and answer before: drafts of n-grams go on across the end of the thoughts."""
    drafts = {"num_speculative_tokens": 12, "adaptive": False}
    found, question = [], "Where is it? <think>"
    told = f"{question} It is by the door.</think>left\n" * 2
    for settings in (
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"speculative_config": {**drafts, "method": "ngram", "prompt_lookup_min": 1}},
        {"speculative_config": {**drafts, "model": "demo"}},
    ):
        llm = make_llm(model="demo", max_model_len=512, **settings)
        params = SamplingParams(
            temperature=0,
            max_tokens=60,
            thinking_token_budget=7,
            structured_outputs={"choice": ["left", "right"], "thoughts_end": "</think>"},
        )
        texts: list[str] = []
        for before in ("", told):
            [output] = llm.generate(f"{before}{question}", params, use_tqdm=False)
            thoughts, end, answer = output.outputs[0].text.partition("</think>")
            assert thoughts and end and answer.strip() in ("left", "right")
            ids = output.outputs[0].token_ids
            assert llm.get_tokenizer().decode(ids[:7]).strip() == thoughts.strip()
            texts.append(output.outputs[0].text)
        found.append(texts)
        if "speculative_config" in settings:
            assert (stats := llm.llm_engine.stats) is not None and stats.num_accepted_tokens > 0
    assert found == found[:1] * 4
