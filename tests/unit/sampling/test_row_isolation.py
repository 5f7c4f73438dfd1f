"""A row's sample depends on its own request alone: not on other rows, the row number, or former requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.sampler import Sampler
from tests.unit.sampling.builders import Bench, Sampled, random_logits, sample_batch

VOCAB = 300

SPICY = Sampled(
    SamplingParams(
        temperature=1.3,
        top_k=7,
        top_p=0.5,
        min_p=0.3,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=9.0,
        seed=99,
        stop_token_ids=list(range(0, VOCAB, 2)),
        min_tokens=50,
        max_tokens=60,
        logprobs=5,
        logit_bias=dict.fromkeys(range(0, VOCAB, 5), 50.0),
        allowed_token_ids=list(range(VOCAB - 9, VOCAB)),
        bad_words_token_ids=[[3], [29, 4], [28, 29, 5]],
    ),
    prompt=range(20),
    output=range(30),
    eos=range(1, VOCAB, 3),
)


def make_params(**changes: Any) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
        top_k=st.sampled_from([0, 0, 1, 5, 70, 299, 1000]),
        min_p=st.sampled_from([0.0, 0.0, 0.1]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.0, -1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
        seed=st.sampled_from([None, 1, 2**62]),
        min_tokens=st.sampled_from([0, 0, 5]),
        logprobs=st.sampled_from([None, None, 0, 3]),
        logit_bias=st.sampled_from([None, None, {5: 9.0, 200: -3.0}]),
        allowed_token_ids=st.sampled_from([None, None, list(range(0, VOCAB, 3))]),
        bad_words_token_ids=st.sampled_from([None, None, [[9], [1, 3], [3, 6, 9]]]),
        **changes,
    )


def make_sequences() -> st.SearchStrategy[list[Sampled]]:
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
    sequence = st.builds(
        Sampled, params=make_params(), prompt=tokens.map(lambda t: [1, *t]), output=tokens, eos=st.just((2, 4))
    )
    return st.lists(sequence, min_size=1, max_size=10)


@settings(max_examples=60, deadline=None)
@given(make_sequences(), st.randoms(use_true_random=False), st.integers(0, 1000))
def test_samples_are_the_same_alone_and_in_any_batch_and_row(sequences, random, seed):
    logits = random_logits(len(sequences), VOCAB, seed=seed)
    bench = Bench(vocab_size=VOCAB, max_rows=20)
    for row in range(20):
        bench.set_row(row, SPICY)
    rows = random.sample(range(20), len(sequences))
    for index, (row, sequence) in enumerate(zip(rows, sequences)):
        sequence.request_id = f"request-{index}"
        bench.set_row(row, sequence)
    together = bench.sample(logits, rows)
    for index, sequence in enumerate(sequences):
        alone = sample_batch(logits[index : index + 1], [sequence])
        assert alone.tolist()[0] == together.tolist()[index]
        assert alone.logprobs.get(0) == together.logprobs.get(index)
    assert set(together.logprobs) == {i for i, s in enumerate(sequences) if s.params.logprobs is not None}


@pytest.mark.parametrize("clear", [True, False])
def test_a_reused_row_has_no_state_of_its_former_request(clear):
    fresh = Sampled(SamplingParams(seed=4, logprobs=2), prompt=[5], output=[6])
    logits = random_logits(1, VOCAB)
    used = Bench(vocab_size=VOCAB)
    used.set_row(3, SPICY)
    used.sample(logits, [3])
    if clear:
        used.clear_row(3)
    used.set_row(3, fresh)
    new = Bench(vocab_size=VOCAB)
    new.set_row(3, fresh)
    for name, value in vars(used.state).items():
        if isinstance(value, np.ndarray):
            assert value[3] == getattr(new.state, name)[3], name
        elif isinstance(value, dict):
            assert value.keys() == getattr(new.state, name).keys(), name
    for _ in range(20):
        ours, theirs = used.sample(logits, [3]), new.sample(logits, [3])
        assert ours.tolist() == theirs.tolist() and ours.logprobs == theirs.logprobs
        for bench in (used, new):
            bench.append([3], ours.tolist())


def test_a_cleared_row_is_greedy_and_has_no_state():
    bench = Bench(vocab_size=VOCAB)
    bench.set_row(0, SPICY)
    bench.clear_row(0)
    assert bench.state.flags[0] == 0 and not bench.state.counts and not bench.state.end_tokens


@pytest.mark.parametrize("seed", [None, 17])
def test_a_request_resumed_after_preemption_continues_its_stream(seed):
    params = SamplingParams(seed=seed, frequency_penalty=0.5)
    logits = random_logits(30, VOCAB, seed=5)

    def generate(preempt_at: set[int]) -> list[int]:
        bench, row, output = Bench(vocab_size=VOCAB), 0, []
        bench.set_row(row, Sampled(params))
        for step in range(30):
            if step in preempt_at:
                bench.clear_row(row)
                bench.set_row(row, SPICY)
                row += 1
                bench.set_row(row, Sampled(params, output=output))
            output = [*output, *bench.sample(logits[step : step + 1], [row]).tolist()]
            bench.append([row], output[-1:])
        return output

    uninterrupted = generate(set())
    assert len(set(uninterrupted)) > 10
    assert generate({1, 7, 8, 29}) == uninterrupted


def test_sampling_the_same_position_twice_gives_the_same_token():
    bench = Bench(vocab_size=VOCAB)
    bench.set_row(0, Sampled(SamplingParams()))
    logits = random_logits(1, VOCAB)
    assert len({bench.sample(logits, [0]).tolist()[0] for _ in range(5)}) == 1


def test_unseeded_requests_differ_from_each_other_and_between_engine_seeds():
    logits = random_logits(1, VOCAB).expand(50, -1)
    requests = [Sampled(SamplingParams(temperature=2.0), request_id=str(i)) for i in range(50)]
    first, again = (sample_batch(logits, requests, engine_seed=0).tolist() for _ in range(2))
    other = sample_batch(logits, requests, engine_seed=1).tolist()
    assert first == again != other
    assert len(set(first)) > 10


def test_greedy_rows_do_not_depend_on_other_rows():
    logits = random_logits(40, VOCAB, seed=8)
    greedy = Sampled(SamplingParams(temperature=0))
    sequences = [greedy if row % 2 else Sampled(SPICY.params, SPICY.prompt, SPICY.output) for row in range(40)]
    sampled = sample_batch(logits, sequences).tolist()
    assert sampled[1::2] == logits.argmax(dim=1).tolist()[1::2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_ties_go_to_the_lowest_token(dtype):
    logits = torch.zeros(2, VOCAB, dtype=dtype)
    logits[0, [40, 41, 200]] = 3.0
    greedy = Sampled(SamplingParams(temperature=0))
    assert sample_batch(logits, [greedy, greedy]).tolist() == [40, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.5}, {"top_p": 0.4}, {"logprobs": 2}]
)
def test_a_broken_row_fails_alone(bad, params):
    logits = random_logits(5, VOCAB, seed=3)
    sequences = [Sampled(SamplingParams(seed=1, **params), prompt=[7], output=[7]) for _ in range(5)]
    sequences[1].params = sequences[2].params = SamplingParams(seed=1, repetition_penalty=1.1)
    healthy = sample_batch(logits, sequences)
    broken = logits.clone()
    broken[2, 17] = broken[3, 250] = bad
    sampled = sample_batch(broken, sequences)
    assert set(sampled.errors) == {2, 3}
    assert all(("NaN" if bad != bad else "infinite") in error for error in sampled.errors.values())
    assert not {2, 3} & set(sampled.logprobs)
    for row in (0, 1, 4):
        assert sampled.tolist()[row] == healthy.tolist()[row]
        assert sampled.logprobs.get(row) == healthy.logprobs.get(row)
    assert all(0 <= token < VOCAB for token in sampled.tolist())


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.5}, {"repetition_penalty": 3.0}])
def test_a_row_without_any_possible_token_fails_alone(params):
    logits = random_logits(3, VOCAB)
    mask = torch.ones(3, VOCAB, dtype=torch.bool)
    mask[1] = False
    sampled = sample_batch(logits, [Sampled(SamplingParams(seed=1, **params))] * 3, mask)
    assert list(sampled.errors) == [1] and "no token can be sampled" in sampled.errors[1]
    logits[1] = -torch.inf
    assert list(sample_batch(logits, [Sampled(SamplingParams(seed=1, **params))] * 3).errors) == [1]


def test_healthy_batches_report_no_errors_and_no_logprobs():
    sampled = sample_batch(random_logits(2, VOCAB), [Sampled(), Sampled(SamplingParams(temperature=0))])
    assert sampled.errors == {} and sampled.logprobs == {}


def test_an_empty_batch_is_accepted():
    bench = Bench(vocab_size=VOCAB)
    assert bench.sample(torch.empty(0, VOCAB), np.empty(0, dtype=np.int64)).tolist() == []


def test_the_logits_are_not_modified():
    logits = random_logits(1, VOCAB).repeat(3, 1)
    before = logits.clone()
    mask = torch.ones_like(logits, dtype=torch.bool)
    mask[:, :100] = False
    sample_batch(logits, [SPICY, Sampled(), Sampled(SamplingParams(temperature=0))], mask)
    sample_batch(logits, [SPICY, SPICY, SPICY])
    sample_batch(logits, [Sampled()] * 3)
    assert torch.equal(logits, before)


def test_the_platform_breaks_ties_independently_of_the_batch() -> None:
    def last_of_equals(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = x.flip(1).max(dim=1)
        return values, x.shape[1] - 1 - places

    greedy, random = Sampled(SamplingParams(temperature=0.0)), Sampled(SamplingParams(temperature=1.0, seed=3))
    logits, sampler = torch.zeros(3, VOCAB, dtype=torch.bfloat16), Sampler(argmax=last_of_equals)
    assert sample_batch(logits[:1], [greedy], sampler=sampler).tolist() == [VOCAB - 1]
    assert sample_batch(logits, [greedy, random, greedy], sampler=sampler).tolist()[::2] == [VOCAB - 1] * 2
