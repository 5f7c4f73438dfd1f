"""Several logits rows of one request, for its draft tokens, give the samples of each position alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.penalties import TokenCounts
from mvllm.sampling.sampler import Sampler
from tests.unit.sampling.builders import Bench, Sampled, random_logits

VOCAB_SIZE = 60
PROMPT, OUTPUT, DRAFTS = [1, 2, 3, 4], [5, 2, 9], [2, 5, 2, 9, 7]

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"seed": 3},
    "unseeded": {},
    "filters": {"seed": 4, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "repetition": {"temperature": 0, "repetition_penalty": 1.9, "logprobs": 3},
    "frequency": {"seed": 5, "frequency_penalty": 1.5, "presence_penalty": -0.7},
    "min_tokens": {"temperature": 0, "min_tokens": 6, "max_tokens": 20, "stop_token_ids": list(range(5, VOCAB_SIZE))},
    "bad_words": {"temperature": 0},
    "bias": {"temperature": 0, "logit_bias": {8: 3.0, 9: -100.0}, "logprobs": 1},
    "allowed": {"seed": 6, "allowed_token_ids": [4, 8, 15, 16, 23, 42]},
}


def make_params(name: str) -> SamplingParams:
    params = SamplingParams(**PARAMS[name])
    if name == "bad_words":
        params.bad_words_token_ids = [[9, token] for token in range(30)] + [[2, 5, token] for token in range(20, 60)]
    return params


def alone(name: str, row: int, length: int, logits: torch.Tensor) -> tuple[int, Any]:
    """The sample of the request once `length` of its draft tokens are known tokens."""
    bench = Bench(vocab_size=VOCAB_SIZE)
    sequence = Sampled(make_params(name), PROMPT, [*OUTPUT, *DRAFTS[:length]], f"request-{row}", [0])
    bench.set_row(row, sequence)
    found = bench.sample(logits[None], [row])
    return found.tolist()[0], found.logprobs.get(0)


@pytest.mark.parametrize("elements_at_once", [1 << 18, 3 * VOCAB_SIZE], ids=["whole", "in parts"])
@pytest.mark.parametrize("names", [[name] for name in PARAMS] + [list(PARAMS)], ids=lambda names: "+".join(names)[:20])
def test_a_row_with_draft_tokens_gives_the_samples_of_each_position_alone(
    names: list[str], elements_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mvllm.sampling.sampler._ELEMENTS_AT_ONCE", elements_at_once)
    bench, rows, lengths = Bench(vocab_size=VOCAB_SIZE), [], []
    for row, name in enumerate(names):
        bench.set_row(row, Sampled(make_params(name), PROMPT, OUTPUT, f"request-{row}", [0]))
        bench.history.set_draft_tokens(row, DRAFTS)
        count = len(DRAFTS) + 1 if len(names) == 1 else row % len(DRAFTS) + 1
        rows += [row] * count
        lengths += range(count)
    logits = random_logits(len(rows), VOCAB_SIZE, seed=len(rows))
    seq_lens = np.array(lengths) + len(PROMPT) + len(OUTPUT)
    for _ in range(2):  # no state of draft tokens is kept
        found = bench.sampler.sample(logits, np.array(rows), bench.state, bench.history, seq_lens=seq_lens)
        for line, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            token, logprobs = alone(names[row], row, length, logits[line])
            assert found.tolist()[line] == token, (names[row], length)
            assert found.logprobs.get(line) == logprobs


def test_log_probabilities_can_be_left_out() -> None:
    bench = Bench(vocab_size=VOCAB_SIZE)
    bench.set_row(0, Sampled(SamplingParams(temperature=0, logprobs=2), PROMPT, OUTPUT))
    logits = random_logits(1, VOCAB_SIZE)
    found = Sampler().sample(logits, np.array([0]), bench.state, bench.history, only_tokens=True)
    assert not found.logprobs and found.tolist() == bench.sample(logits, [0]).tolist()


def test_counts_of_draft_tokens_do_not_change_counts_of_known_tokens() -> None:
    tokens = np.array([1, 2, 2, 3, 3, 1, 70, 71], dtype=np.int32)
    counts = TokenCounts()
    counts.update(tokens[:4], 2)
    before = dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
    longer = counts.extended_copy(tokens, 2)
    assert dict(zip(longer.token_ids.tolist(), longer.counts.tolist(), strict=True)) == {1: 1, 2: 1, 3: 2, 70: 1, 71: 1}
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == before == {1: 0, 2: 1, 3: 1}
    counts.update(tokens[:5], 2)
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == {1: 0, 2: 1, 3: 2}
