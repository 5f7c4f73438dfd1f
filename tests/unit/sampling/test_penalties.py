"""Penalties and minimum length compared with the slow reference, on greedy rows, where every token is determined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.penalties import TokenCounts
from tests.unit.sampling.builders import Bench, Sampled, random_logits, sample_batch
from tests.unit.sampling.reference import distribution

VOCAB = 40


@settings(max_examples=100, deadline=None)
@given(
    presence=st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    frequency=st.sampled_from([0.0, -1.3, 0.4, 2.0]),
    repetition=st.sampled_from([1.0, 0.5, 1.4, 8.0]),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=15),
    seed=st.integers(0, 1000),
)
def test_a_greedy_generation_follows_the_reference(presence, frequency, repetition, prompt, seed):
    params = SamplingParams(
        temperature=0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    bench, logits = Bench(vocab_size=VOCAB), random_logits(25, VOCAB, seed=seed, scale=1.0)
    bench.set_row(2, Sampled(params, prompt))
    output: list[int] = []
    for step in range(25):
        expected = distribution(logits[step].numpy(), params, prompt, output)
        (token,) = bench.sample(logits[step : step + 1], [2]).tolist()
        assert token == int(expected.argmax())
        output.append(token)
        bench.append([2], [token])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 200), max_size=200),
    st.lists(st.integers(0, 200), max_size=200),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_incremental_counts_equal_counts_computed_at_once(prompt, output, stops):
    tokens = np.array([*prompt, *output], dtype=np.int32)
    counts = TokenCounts()
    for stop in [*sorted(stops), len(tokens)]:
        counts.update(tokens[: min(stop, len(tokens))], len(prompt))
    found = dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token: output.count(token) for token in {*prompt, *output}}


def test_the_prompt_counts_for_the_repetition_penalty_only():
    logits = random_logits(1, VOCAB)
    best = int(logits.argmax())
    for changes, stays in (
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, True),
        ({"repetition_penalty": 50.0}, False),
    ):
        (token,) = sample_batch(logits, [Sampled(SamplingParams(temperature=0, **changes), prompt=[best])]).tolist()
        assert (token == best) is stays


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_end_token_before_min_tokens(temperature, ignore_eos):
    """End of sequence is by far the most probable token, then a stop token, then another."""
    eos, stop, other = 9, 30, 11
    logits = random_logits(1, VOCAB, scale=0.1)
    logits[0, [eos, stop, other]] = logits.new_tensor([90.0, 60.0, 30.0])
    params = SamplingParams(
        temperature=temperature, min_tokens=3, max_tokens=9, stop_token_ids=[stop], ignore_eos=ignore_eos, seed=1
    )
    bench, tokens = Bench(vocab_size=VOCAB), []
    bench.set_row(0, Sampled(params, prompt=[eos, stop], eos=[eos, VOCAB + 5]))
    for _ in range(5):
        tokens += bench.sample(logits, [0]).tolist()
        bench.append([0], tokens[-1:])
    assert tokens == ([eos] * 5 if ignore_eos else [other] * 3 + [eos] * 2)


def test_min_tokens_counts_what_was_generated_before_a_preemption():
    logits = random_logits(1, VOCAB)
    best = int(logits.argmax())
    params = SamplingParams(temperature=0, min_tokens=3)
    for generated, is_open in ((2, False), (3, True)):
        sequence = Sampled(params, prompt=[1, 2, 3, 4], output=[5] * generated, eos=[best])
        assert (sample_batch(logits, [sequence]).tolist()[0] == best) is is_open


def test_logprobs_are_those_of_the_model_without_penalties():
    logits = random_logits(1, VOCAB)
    best = int(logits.argmax())
    params = SamplingParams(temperature=0, repetition_penalty=50.0, logprobs=1, min_tokens=1)
    sampled = sample_batch(logits, [Sampled(params, prompt=[best], eos=[3])])
    found = sampled.logprobs[0]
    assert found.token_ids[0] != best and found.token_ids[1] == best and found.rank > 1
    exact = logits[0].double().log_softmax(0)
    assert found.logprobs == pytest.approx([float(exact[i]) for i in found.token_ids], abs=1e-5)
