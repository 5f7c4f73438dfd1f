"""Samples follow a float64 reference distribution, for each parameter and for combinations.

A test puts 500 requests that differ only in their seeds into one batch and samples 40 positions of each.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mvllm.messages.sampling_params import SamplingParams
from tests.unit.sampling.builders import Bench, Sampled, random_logits, sample_batch
from tests.unit.sampling.reference import distribution
from tests.unit.sampling.statistics import assert_drawn_from

VOCAB = 60
NUM_ROWS, NUM_POSITIONS = 500, 40
PROMPT, OUTPUT, EOS = (3, 8, 8, 21), (5, 5, 5, 8, 30, 31), (40,)


def draw_counts(logits: torch.Tensor, settings: dict, mask: torch.Tensor | None = None) -> np.ndarray:
    """Counts 20 000 samples of one token after the same prompt and output."""
    vocab_size = len(logits)
    bench = Bench(vocab_size=vocab_size, max_rows=NUM_ROWS)
    counts = np.zeros(vocab_size, dtype=np.int64)
    batch_mask = None if mask is None else mask.expand(NUM_ROWS, -1)
    for row in range(NUM_ROWS):
        bench.set_row(row, Sampled(SamplingParams(seed=1000 + row, **settings), PROMPT, OUTPUT, eos=EOS))
    for position in range(NUM_POSITIONS):
        # Another position for the random numbers; all other state has the same number of generated tokens.
        bench.state.seeds += np.uint64(position << 32)
        sampled = bench.sample(logits.expand(NUM_ROWS, -1), range(NUM_ROWS), batch_mask)
        counts += np.bincount(sampled.tolist(), minlength=vocab_size)
    return counts


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 2},
    {"top_k": 10},
    {"top_k": 59},
    {"top_k": 60},
    {"top_k": 100_000},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.4},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"min_tokens": 7},
    {"min_tokens": 6},
    {"min_tokens": 7, "stop_token_ids": [5, 6]},
    {"min_tokens": 7, "stop_token_ids": [5, 6], "ignore_eos": True},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.4, "top_k": 30, "min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 25, "top_p": 0.9, "min_p": 0.03},
    {"temperature": 3.0, "top_p": 0.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"top_k": 8, "repetition_penalty": 2.0, "min_tokens": 12},
    {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.6,
        "frequency_penalty": -0.4,
        "repetition_penalty": 1.2,
        "min_tokens": 20,
        "stop_token_ids": [0, 59],
    },
]


def id_of(settings: dict) -> str:
    return ",".join(f"{name}={value}" for name, value in settings.items()) or "plain"


@pytest.mark.parametrize("settings", SETTINGS, ids=id_of)
def test_samples_follow_the_reference(settings):
    logits = random_logits(1, VOCAB, seed=11)[0]
    params = SamplingParams(**{"max_tokens": 64, **settings})
    expected = distribution(logits.numpy(), params, PROMPT, OUTPUT, EOS)
    assert_drawn_from(draw_counts(logits, {"max_tokens": 64, **settings}), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{}, {"top_k": 12, "top_p": 0.9}, {"top_p": 0.7}], ids=id_of)
def test_low_precision_logits_are_sampled_in_float32(dtype, settings):
    logits = random_logits(1, VOCAB, seed=12)[0].to(dtype)
    expected = distribution(logits.float().numpy(), SamplingParams(**settings))
    assert_drawn_from(draw_counts(logits, settings), expected)


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 10}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.5}], ids=id_of
)
def test_a_mask_applies_before_everything_else(settings):
    logits = random_logits(1, VOCAB, seed=13)[0]
    mask = torch.from_numpy(np.random.default_rng(5).random(VOCAB) < 0.3)
    expected = distribution(logits.numpy(), SamplingParams(**settings), PROMPT, OUTPUT, EOS, mask.numpy())
    assert_drawn_from(draw_counts(logits, settings, mask), expected)


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.9}], ids=id_of)
def test_tokens_that_tie_with_the_last_kept_token_are_kept(settings):
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    expected = distribution(logits.numpy(), SamplingParams(**settings))
    assert (expected > 0).sum() == 5
    assert_drawn_from(draw_counts(torch.nn.functional.pad(logits, (0, 52), value=-9.0), settings)[:8], expected)


@pytest.mark.parametrize(
    "settings",
    [
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ({"top_k": 1500}, {"top_k": 300})),
        {"top_k": 1500, "top_p": 0.9},
    ],
    ids=id_of,
)
def test_large_top_k(settings):
    logits = random_logits(1, 4000, seed=14, scale=0.5)[0]
    expected = distribution(logits.numpy(), SamplingParams(**settings))
    counts = draw_counts(logits, settings)
    assert counts[expected == 0].sum() == 0
    # 4000 outcomes are too many for 20 000 samples: compare cells of 40 tokens of similar probability.
    cell = np.empty(4000, dtype=np.int64)
    cell[np.argsort(-expected)] = np.arange(4000) // 40
    assert_drawn_from(np.bincount(cell, counts).astype(int), np.bincount(cell, expected))


def test_extreme_settings_keep_at_least_the_most_probable_token():
    logits = random_logits(1, VOCAB, seed=15)
    best = int(logits.argmax())
    for settings in (
        {"top_p": 5e-324},
        {"min_p": 1.0},
        {"temperature": 1e-300},
        {"top_k": 1},
        {"temperature": 50.0, "top_p": 1e-9},
    ):
        for seed in range(20):
            sampled = sample_batch(logits, [Sampled(SamplingParams(seed=seed, **settings))])
            assert sampled.tolist() == [best] and not sampled.errors, settings


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e308},
        {"temperature": 1e308, "min_p": 5e-324},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1.7e308},
        {"repetition_penalty": 1.7e308, "presence_penalty": 2.0, "temperature": 1e-300, "top_p": 1e-300},
    ],
    ids=id_of,
)
@pytest.mark.parametrize("scale", [2.0, 1e30])
def test_no_accepted_setting_makes_a_row_fail(settings, scale):
    logits = random_logits(1, VOCAB, seed=16, scale=scale)
    logits[0, 1] = 0.0
    logits[0, 2] = -torch.inf
    sampled = sample_batch(logits, [Sampled(SamplingParams(seed=1, **settings), prompt=range(30), output=range(10))])
    assert not sampled.errors and 0 <= sampled.tolist()[0] < VOCAB and sampled.tolist()[0] != 2


def test_a_large_temperature_is_close_to_uniform():
    counts = draw_counts(random_logits(1, VOCAB)[0], {"temperature": 1e308})
    assert_drawn_from(counts, np.full(VOCAB, 1 / VOCAB))


@pytest.mark.parametrize(
    "settings",
    [
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ({}, {"top_k": 40}, {"min_p": 0.01})),
        {"top_p": 0.9},
    ],
    ids=id_of,
)
def test_a_large_vocabulary_in_one_batch(settings):
    """Cumulative shares of the vocabulary, most probable first, match within the error of 800 samples."""
    vocab_size, num_rows = 128_256, 100
    logits = random_logits(1, vocab_size, seed=17, scale=3.0)
    expected = _fast_distribution(logits[0].numpy(), **settings)
    bench = Bench(vocab_size=vocab_size, max_rows=num_rows)
    for row in range(num_rows):
        bench.set_row(row, Sampled(SamplingParams(seed=row, **settings)))
    drawn = []
    for _ in range(8):
        drawn += bench.sample(logits.expand(num_rows, -1), range(num_rows)).tolist()
        bench.append(range(num_rows), drawn[-num_rows:])
    assert (expected[drawn] > 0).all()
    order = np.argsort(-expected)
    rank = np.empty(vocab_size, dtype=np.int64)
    rank[order] = np.arange(vocab_size)
    cumulative = np.cumsum(expected[order])
    for edge in (1, 5, 20, 100, 1000, 10_000, 100_000):
        share, wanted = np.mean(rank[drawn] < edge), cumulative[edge - 1]
        assert abs(share - wanted) < 4.5 * math.sqrt(max(wanted * (1 - wanted), 1e-4) / len(drawn))


def _fast_distribution(logits: np.ndarray, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """One filter at a time over a large vocabulary, in float64."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    probs[probs < min_p] = 0
    falling = np.sort(probs)[::-1]
    if top_k:
        probs[probs < falling[top_k - 1]] = 0
    if top_p < 1:
        probs[probs < falling[np.searchsorted(np.cumsum(falling), top_p * falling.sum())]] = 0
    return probs / probs.sum()
