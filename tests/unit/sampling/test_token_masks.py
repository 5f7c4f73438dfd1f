"""Token masks from the host, for some rows of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.token_masks import TokenMasks, unpack_masks
from tests.unit.sampling.builders import Bench, Sampled, random_logits


def pack(allowed: np.ndarray) -> bytes:
    """Masks, bool [n, vocab], in the format of a plan."""
    words = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), dtype=bool)
    words[:, : allowed.shape[1]] = allowed
    return np.packbits(words, axis=1, bitorder="little").tobytes()


@pytest.mark.parametrize("vocab_size", [31, 32, 100, 4099])
def test_bits_are_unpacked_in_their_places(vocab_size: int) -> None:
    allowed = np.random.default_rng(vocab_size).random((5, vocab_size)) < 0.3
    rows = [9, 2, 40, 7, 0]
    masks = TokenMasks(rows, pack(allowed))
    assert masks.covers(np.array([2, 3, 9])).tolist() == [True, False, True]
    order = [2, 0, 4]
    words = torch.from_numpy(masks.words(np.array([rows[i] for i in order]), np.zeros(3, dtype=int)).astype(np.float32))
    assert np.array_equal(unpack_masks(words, 3, vocab_size).numpy(), allowed[order])


def test_a_row_with_draft_tokens_has_a_mask_for_each_of_its_positions() -> None:
    masks = TokenMasks([4, 2, 2, 2, 9], pack(np.eye(5, 64, dtype=bool)))
    words = masks.words(np.array([2, 2, 9, 4, 2]), np.array([0, 2, 0, 0, 1]))
    assert words[:, 0].tolist() == [2, 8, 16, 1, 4]


def bench_of(num_rows: int, vocab_size: int) -> Bench:
    bench = Bench(vocab_size=vocab_size, max_rows=num_rows)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
    ]
    for row in range(num_rows):
        bench.set_row(row, Sampled(kinds[row % len(kinds)], request_id=str(row)))
    return bench


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_rows_choose_from_allowed_tokens_and_other_rows_are_unchanged(dtype: torch.dtype) -> None:
    num_rows, vocab_size = 12, 300
    logits = random_logits(num_rows, vocab_size, seed=3).to(dtype)
    kept = logits.clone()
    bench, rows = bench_of(num_rows, vocab_size), np.arange(num_rows)
    free = bench.sampler.sample(logits, rows, bench.state, bench.history).tolist()
    masked = [1, 4, 6, 7, 10]
    allowed = np.zeros((len(masked), vocab_size), dtype=bool)
    for i, row in enumerate(masked):
        allowed[i, [(row * 13 + k) % vocab_size for k in range(3)]] = True
        allowed[i, free[row]] = False
    masks = TokenMasks(masked, pack(allowed))
    found = bench.sampler.sample(logits, rows, bench.state, bench.history, masks=masks)
    assert not found.errors and torch.equal(logits, kept)
    for row, token in enumerate(found.tolist()):
        if row in masked:
            assert allowed[masked.index(row), token]
        else:
            assert token == free[row]
    # Each row alone samples the same, and no mask remains for the next step.
    for i, row in enumerate(masked):
        own = TokenMasks([row], pack(allowed[i : i + 1]))
        alone = bench.sampler.sample(logits[row : row + 1], rows[row : row + 1], bench.state, bench.history, masks=own)
        assert alone.tolist() == [found.tolist()[row]]
    assert bench.sampler.sample(logits, rows, bench.state, bench.history).tolist() == free


def test_a_mask_that_allows_nothing_fails_its_row_alone() -> None:
    bench, logits = bench_of(2, 40), random_logits(2, 40)
    masks = TokenMasks([1], pack(np.zeros((1, 40), dtype=bool)))
    found = bench.sampler.sample(logits, np.arange(2), bench.state, bench.history, masks=masks)
    assert list(found.errors) == [1] and "no token can be sampled" in found.errors[1]


def test_grammar_masks_replace_min_tokens() -> None:
    bench, logits = Bench(vocab_size=40), random_logits(1, 40)
    params = SamplingParams(temperature=0.0, min_tokens=5, structured_outputs={"regex": "a"})
    bench.set_row(0, Sampled(params, eos=[3]))
    only_end = np.zeros((1, 40), dtype=bool)
    only_end[0, 3] = True
    found = bench.sampler.sample(
        logits, np.arange(1), bench.state, bench.history, masks=TokenMasks([0], pack(only_end))
    )
    assert found.tolist() == [3] and not found.errors
