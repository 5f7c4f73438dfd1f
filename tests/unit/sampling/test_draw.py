"""Drawing from weights: correct frequencies for any vocabulary, and never a token of weight zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.ops.draw import draw
from mvllm.sampling.uniforms import uniforms
from tests.unit.sampling.statistics import assert_drawn_from

LARGE = 128_256
LAST = 1.0 - 2.0**-24


def draw_many(weights: torch.Tensor, count: int, seed: int = 1) -> np.ndarray:
    """Draws `count` tokens from `weights` [vocab]."""
    coarse, fine = uniforms(np.full(count, seed, dtype=np.uint64), np.arange(count))
    drawn = [
        draw(weights.expand(len(c), -1), c, f)
        for c, f in zip(torch.from_numpy(coarse).split(500), torch.from_numpy(fine).split(500))
    ]
    return torch.cat(drawn).numpy()


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 64, 97, 500, 2048])
def test_small_vocabularies(vocab_size):
    weights = torch.from_numpy(np.random.default_rng(vocab_size).exponential(size=vocab_size).astype(np.float32))
    counts = np.bincount(draw_many(weights, 20_000), minlength=vocab_size)
    assert_drawn_from(counts, weights.double().numpy() / weights.double().sum().item())


def test_a_long_flat_tail_has_its_correct_frequency():
    """One token has half of the mass; each of 128 255 others so little that a float32 running sum would lose it."""
    weights = torch.full((LARGE,), 1.0 / (LARGE - 1))
    weights[1000] = 1.0
    drawn = draw_many(weights, 20_000)
    in_tail = drawn[drawn != 1000]
    assert_drawn_from(np.array([len(drawn) - len(in_tail), len(in_tail)]), np.array([0.5, 0.5]))
    # Flat over the tail: across the vocabulary, and within blocks of any size.
    for cells in (np.bincount(in_tail * 64 // LARGE, minlength=64), np.bincount(in_tail % 64, minlength=64)):
        assert_drawn_from(cells, np.full(64, 1 / 64))
    assert len(np.unique(in_tail)) > 0.9 * len(in_tail)


def test_a_realistic_large_distribution():
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal(LARGE).astype(np.float32) * 3)
    weights = (logits - logits.max()).exp()
    exact = (logits.double() - logits.max()).exp().numpy()
    exact /= exact.sum()
    order = np.argsort(-exact)
    drawn = draw_many(weights, 20_000)
    rank = np.empty(LARGE, dtype=np.int64)
    rank[order] = np.arange(LARGE)
    # Cells by rank, each of about 1 % of the mass: the head token by token, the tail thousands at a time.
    cell = np.minimum((np.cumsum(exact[order]) * 100).astype(int), 99)
    assert_drawn_from(np.bincount(cell[rank[drawn]], minlength=100), np.bincount(cell, exact[order], minlength=100))


@pytest.mark.parametrize("vocab_size", [97, 2048, 50_257, LARGE])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, LAST])
def test_tokens_of_weight_zero_are_never_drawn(vocab_size, uniform):
    generator = np.random.default_rng(3)
    weights = generator.exponential(size=(20, vocab_size)).astype(np.float32)
    weights[generator.random(weights.shape) < 0.95] = 0.0
    weights[:, :40] = 0.0
    weights[:, -40:] = 0.0
    weights[:, 50] = 1e-30  # tiny, but possible
    extreme = torch.full((20,), uniform)
    drawn = draw(torch.from_numpy(weights), extreme, extreme).numpy()
    assert (weights[np.arange(20), drawn] > 0).all()


@pytest.mark.parametrize("position", [0, 1, 511, 512, 70_000, LARGE - 1])
def test_a_single_possible_token_is_drawn_for_every_uniform(position):
    weights = torch.zeros(4, LARGE)
    weights[:, position] = 1e-20
    edges = torch.tensor([0.0, 0.3, 0.999, LAST])
    assert draw(weights, edges, edges.flip(0)).tolist() == [position] * 4


def test_degenerate_weights_still_give_a_token_of_the_vocabulary():
    weights = torch.ones(3, 100)
    weights[0], weights[1], weights[2] = 0.0, torch.nan, torch.inf
    drawn = draw(weights, torch.full((3,), LAST), torch.full((3,), LAST))
    assert ((drawn >= 0) & (drawn < 100)).all()
