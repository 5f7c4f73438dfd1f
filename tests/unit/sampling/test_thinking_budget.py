"""Thinking budgets: the tokens to force are a function of the tokens before them, in every form of a batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.thinking import ThinkingTokens
from mvllm.sampling import sampler as sampler_module
from mvllm.sampling.forced_tokens import NEVER, NOT_FORCED, ThinkingBudgets
from mvllm.sampling.sampler import Sampler
from tests.unit.sampling.builders import Bench, Sampled, random_logits

START, END, FORCED, SPACE = 1, 2, [3, 2], 4
VOCAB = 64


def limited(budget: int, **more: Any) -> SamplingParams:
    tokens = {"starts": [[START]], "ends": [[END]], "forced": FORCED, **more.pop("tokens", {})}
    return SamplingParams(temperature=0, thinking_token_budget=budget, thinking_tokens=tokens, **more)


def expected(budget: int, output: list[int], *, opened: bool) -> int:
    """The forced token after an output, found by reading it from its beginning."""
    at = 0
    if not opened:
        if START not in output[:5]:
            return NOT_FORCED
        at = output.index(START) + 1
    thoughts = output[at:]
    if END in thoughts[:budget] or not budget <= len(thoughts) < budget + len(FORCED):
        return NOT_FORCED
    return FORCED[len(thoughts) - budget]


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_forced_as_if_the_output_were_read_from_its_beginning(seed: int) -> None:
    rng = random.Random(seed)
    budgets = ThinkingBudgets(2)
    for _ in range(200):
        opened, budget, prompt = rng.random() < 0.5, rng.randrange(6), rng.randrange(1, 5)
        tokens = ThinkingTokens(starts=[] if opened else [[START]], ends=[[END]], forced=FORCED)
        budgets.set_row(1, budget, tokens, prompt)
        history = np.zeros((2, 32), dtype=np.int32)
        output: list[int] = [SPACE] * rng.choice((0, 0, 2, 5)) + [START] * (rng.random() < 0.7) if not opened else []
        begun = rng.randrange(len(output) + 1)  # a resumed request starts with some of its output
        for length in range(begun, 16):
            drafts = [rng.randrange(7) for _ in range(3)]
            known = [*output, *[rng.randrange(5, 9) for _ in range(length - len(output))]][:length]
            output = known if length >= len(output) else output
            history[1, prompt : prompt + length + 3] = [*known, *drafts]
            lengths = np.array([prompt + length + k for k in range(4)])
            found = budgets.forced_tokens(np.full(4, 1), lengths, history, np.array([0, prompt + length]))
            wanted = [expected(budget, known + drafts[:k], opened=opened) for k in range(4)]
            # Behind a draft token that is not the forced one nothing is accepted, and any answer is right.
            wrong = next((k + 1 for k in range(3) if wanted[k] not in (NOT_FORCED, drafts[k])), 4)
            answers = [NOT_FORCED] * 4 if found is None else found.tolist()
            assert answers[:wrong] == wanted[:wrong]
            if wanted[0] != NOT_FORCED:
                output = [*known, wanted[0]]
            elif rng.random() < 0.1:
                output = [*known, END]
        budgets.clear_row(1)
    assert not budgets and budgets.check_from.tolist() == [NEVER] * 2


def test_a_row_is_looked_at_only_where_its_thoughts_may_begin_or_end() -> None:
    budgets = ThinkingBudgets(1)
    budgets.set_row(0, 10, ThinkingTokens(starts=[[START]], ends=[[END]], forced=FORCED), 3)
    history = np.zeros((1, 40), dtype=np.int32)
    history[0, 3:] = 9
    history[0, 3] = START
    looked = []
    for length in range(3, 30):
        if budgets.are_due(np.array([0]), np.array([length]))[0]:
            looked.append(length)
            budgets.forced_tokens(np.array([0]), np.array([length]), history, np.array([length]))
    assert looked == [4, 14, 15, 16]


@pytest.mark.parametrize("form", ["plain", "static", "in parts"])
def test_a_forced_token_replaces_any_other_in_its_row_only(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "in parts":
        monkeypatch.setattr(sampler_module, "_ELEMENTS_AT_ONCE", 2 * VOCAB)
    params = [
        SamplingParams(temperature=0),
        limited(2, allowed_token_ids=[7], bad_words_token_ids=[[3]], logprobs=1),
        SamplingParams(temperature=1, seed=1),
        limited(3),
    ]
    bench = Bench(vocab_size=VOCAB)
    bench.sampler = Sampler(static=form == "static")
    for row, each in enumerate(params):
        bench.set_row(row, Sampled(each, output=(START, 9, 9)))
    logits = random_logits(len(params), VOCAB)
    found = bench.sample(logits, range(len(params)))
    assert found.tolist()[1] == FORCED[0] and not found.errors
    logprobs = torch.log_softmax(logits[1], 0)
    assert found.logprobs[1].token_ids[0] == FORCED[0]
    assert found.logprobs[1].logprobs[0] == pytest.approx(float(logprobs[FORCED[0]]), abs=1e-5)
    for row, each in enumerate(params):
        each.thinking_token_budget = None
        if row != 1:
            bench.set_row(row, Sampled(each, output=(START, 9, 9)))
    bench.clear_row(1)
    assert bench.sample(logits[[0, 2, 3]], [0, 2, 3]).tolist() == [found.tolist()[row] for row in (0, 2, 3)]
