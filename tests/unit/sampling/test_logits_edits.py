"""Bad words, allowed tokens and logit biases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling.bad_words import BadWords
from mvllm.sampling.token_masks import TokenMasks, intersect_masks, mask_from_token_ids
from tests.unit.sampling.builders import Bench, Sampled, random_logits, sample_batch
from tests.unit.sampling.test_token_masks import pack


def blocked(words: list[list[int]], tokens: list[int]) -> list[int]:
    return sorted(set(BadWords(words, 100).blocked(np.array(tokens, dtype=np.int32)).tolist()))


def test_the_last_token_of_a_bad_word_is_blocked_after_its_first_tokens() -> None:
    words = [[5], [1, 2], [1, 2, 3], [2, 2, 2, 7], [4, 200]]
    assert blocked(words, [9]) == [5]
    assert blocked(words, [9, 1]) == [2, 5]
    assert blocked(words, [9, 1, 2]) == [3, 5]
    assert blocked(words, [2, 2]) == [5], "the history is shorter than the word"
    assert blocked(words, [2, 2, 2]) == [5, 7]
    assert blocked(words, [4]) == [5], "ids that no logit has do not count"


def test_only_bad_words_of_several_tokens_read_tokens() -> None:
    assert not BadWords([[5], [6]], 100).reads_tokens
    assert BadWords([[5], [6, 7]], 100).reads_tokens
    bench = Bench(vocab_size=100)
    kinds = [{"bad_words_token_ids": [[5]]}, {"bad_words_token_ids": [[5, 6]]}, {"logit_bias": {5: 1}}, {}]
    for row, settings in enumerate(kinds):
        bench.set_row(row, Sampled(SamplingParams(**settings)))
    assert bench.state.rows_reading_tokens(np.arange(4)).tolist() == [1]


@pytest.mark.parametrize("vocab_size", [15, 16, 17, 320])
def test_masks_from_token_lists(vocab_size: int) -> None:
    ids = [0, 7, vocab_size - 1, vocab_size + 5]
    bits = np.unpackbits(mask_from_token_ids(ids, vocab_size).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [0, 7, vocab_size - 1]


def test_two_masks_of_different_lengths_both_apply() -> None:
    one, other = mask_from_token_ids(range(20), 20), mask_from_token_ids(range(10, 64), 64)
    assert np.array_equal(
        intersect_masks(one, other, 4), intersect_masks(mask_from_token_ids(range(10, 20), 64), None, 4)
    )
    assert np.array_equal(intersect_masks(None, one, 4), mask_from_token_ids(range(20), 64))


def test_masks_of_some_rows_do_not_shorten_allowed_tokens_of_others() -> None:
    """The grammar has 40 tokens, the model 100: a row without a grammar may choose beyond the 40."""
    bench, logits = Bench(vocab_size=100), torch.zeros(3, 100)
    logits[:, 90], logits[:, 30], logits[:, 31] = 9.0, 8.0, 7.0
    greedy = {"temperature": 0.0}
    bench.set_row(0, Sampled(SamplingParams(**greedy, allowed_token_ids=[90, 3])))
    bench.set_row(1, Sampled(SamplingParams(**greedy, allowed_token_ids=[90, 31])))
    bench.set_row(2, Sampled(SamplingParams(**greedy)))
    form = np.zeros((1, 40), dtype=bool)
    form[0, 30:32] = True
    masks = TokenMasks([1], pack(form))
    found = bench.sampler.sample(logits, np.arange(3), bench.state, bench.history, masks=masks)
    assert found.tolist() == [90, 31, 90] and not found.errors


def test_biases_apply_before_penalties_and_do_not_unblock_tokens() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 3] = 1.0
    settings = {"temperature": 0.0, "repetition_penalty": 4.0, "logit_bias": {7: 3.0, 8: 2.0, 9: 100.0}}
    sequence = Sampled(SamplingParams(**settings, bad_words_token_ids=[[9]]), prompt=[7])
    found = sample_batch(logits, [sequence])
    assert found.tolist() == [8], "7 has 3.0 / 4.0 left, 8 has 2.0, 9 cannot be chosen"


def test_the_input_logits_are_not_modified() -> None:
    logits = random_logits(4, 60, seed=1)
    kept = logits.clone()
    params = SamplingParams(logit_bias={5: 9}, allowed_token_ids=[5, 6], bad_words_token_ids=[[5], [3, 6]])
    sample_batch(logits, [Sampled(params)] * 4)
    assert torch.equal(logits, kept)
