"""The top-k candidate pass changes no token, in any batch."""

from __future__ import annotations

import pytest
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.filters import num_candidates
from mvllm.sampling.sampler import Sampler
from tests.unit.sampling.builders import Sampled, random_logits, sample_batch

VOCAB = 20_001
SETTINGS = (
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50},
    {"top_k": 64, "min_p": 0.01},
    {"top_k": 65, "top_p": 0.5},
    {"top_k": 1000, "top_p": 0.99},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.3, "min_p": 0.1},
)


class Dense(Sampler):
    """A sampler that never synchronizes, as with asynchronous scheduling."""

    def __init__(self) -> None:
        super().__init__()
        self.may_synchronize = False


def sequences(count: int, **settings) -> list[Sampled]:
    return [Sampled(SamplingParams(temperature=0.9, seed=i, **settings), output=[1] * (i % 7)) for i in range(count)]


def tokens(logits: torch.Tensor, batch: list[Sampled], sampler: Sampler | None = None) -> list[int]:
    return sample_batch(logits, batch, sampler=sampler).token_ids.tolist()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_tokens_are_the_same_with_and_without_synchronizing(settings, scale) -> None:
    logits = random_logits(40, VOCAB, seed=3, scale=scale)
    batch = sequences(40, **settings)
    assert tokens(logits, batch) == tokens(logits, batch, Dense())


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_tokens_that_tie_with_the_last_one_stay(settings) -> None:
    """A hundred equal logits, more than there are candidates, so that the whole vocabulary is needed."""
    logits = torch.full((100, VOCAB), -9.0)
    logits[:, 700:800] = 1.0
    batch = sequences(100, **settings)
    found = tokens(logits, batch)
    assert found == tokens(logits, batch, Dense())
    assert set(found) <= set(range(700, 800)) and len(set(found)) > 45


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_row_does_not_depend_on_a_row_with_more_candidates(settings) -> None:
    logits = random_logits(30, VOCAB, seed=5)
    logits[1::3] = 0.5  # all logits tie
    logits[2::3] *= 0.01  # flat distribution
    batch = sequences(30, **settings)
    batch[4::5] = sequences(6, top_k=200, top_p=0.8)
    alone = [tokens(logits[i : i + 1], [batch[i]])[0] for i in range(30)]
    assert tokens(logits, batch) == alone


def test_more_rows_than_one_chunk(monkeypatch) -> None:
    """In chunks: the same tokens, log-probabilities and errors, at the same positions."""
    logits = random_logits(23, VOCAB, seed=9)
    logits[13] = float("nan")
    batch = [
        Sampled(SamplingParams(temperature=i % 3, seed=i, logprobs=[None, 2, 4][i % 3], top_k=[0, 30][i % 2]))
        for i in range(23)
    ]
    mask = torch.ones(23, VOCAB, dtype=torch.bool)
    mask[7] = False
    whole = sample_batch(logits, batch, mask)
    monkeypatch.setattr("mvllm.sampling.sampler._ELEMENTS_AT_ONCE", 5 * VOCAB)
    parts = sample_batch(logits, batch, mask)
    assert parts.tolist() == whole.tolist() and parts.logprobs == whole.logprobs
    assert list(parts.errors) == list(whole.errors) == [7, 13]


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_rows_with_few_allowed_tokens(settings) -> None:
    logits = random_logits(20, VOCAB, seed=8)
    mask = torch.zeros(20, VOCAB, dtype=torch.bool)
    mask[:, VOCAB - 1] = mask[:, 5] = True
    found = sample_batch(logits, sequences(20, **settings), mask).token_ids.tolist()
    assert found == sample_batch(logits, sequences(20, **settings), mask, sampler=Dense()).token_ids.tolist()
    assert set(found) == {5, VOCAB - 1}


def test_numbers_of_candidates() -> None:
    import numpy as np

    top_k = np.array([1, 2, 63, 64, 65, 128, 129, 1024])
    assert num_candidates(top_k).tolist() == [64, 64, 64, 64, 128, 128, 256, 1024]
