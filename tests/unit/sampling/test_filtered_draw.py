"""A sampler with a provider's `filtered_draw` samples the same tokens as without."""

from __future__ import annotations

import itertools

import pytest
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.ops.draw import draw, draw_block, filtered_draw
from mvllm.sampling.sampler import Sampler
from tests.unit.sampling.builders import Sampled, random_logits, sample_batch

SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.3, 1.0, 1.7), (0, 5, 200, 1100), (1.0, 0.9, 0.3), (0.0, 0.05)
    )
]


def batch(**more: object) -> list[Sampled]:
    return [Sampled(SamplingParams(seed=7 * i, **settings, **more)) for i, settings in enumerate(SETTINGS)]


@pytest.mark.parametrize("vocab_size", [97, 2048, 5003])
@pytest.mark.parametrize("may_synchronize", [True, False])
def test_tokens_are_the_same_with_and_without(vocab_size: int, may_synchronize: bool) -> None:
    logits = random_logits(len(SETTINGS), vocab_size)
    own, provided = Sampler(), Sampler(filtered_draw=filtered_draw)
    own.may_synchronize = provided.may_synchronize = may_synchronize
    for round_ in range(4):
        sequences = batch(frequency_penalty=0.1 * (round_ % 2))
        expected = sample_batch(logits, sequences, sampler=own, engine_seed=round_).tolist()
        assert sample_batch(logits, sequences, sampler=provided, engine_seed=round_).tolist() == expected


def test_all_random_rows_are_drawn_in_one_call_without_greedy_rows() -> None:
    seen = []

    def note(logits: torch.Tensor, *arguments: object) -> torch.Tensor:
        seen.append((len(logits), logits.dtype, arguments[-1]))
        return filtered_draw(logits, *arguments)  # type: ignore[arg-type]

    greedy = Sampled(SamplingParams(temperature=0))
    logits = random_logits(40, 128_256).bfloat16()
    sequences = [greedy, *[Sampled(SamplingParams(temperature=1, seed=i)) for i in range(38)], greedy]
    found = sample_batch(logits, sequences, sampler=Sampler(filtered_draw=note)).tolist()
    assert seen == [(38, torch.float32, draw_block(128_256))]
    assert [found[0], found[-1]] == logits[[0, -1]].argmax(dim=1).tolist()


def test_log_probabilities_and_failed_rows_are_the_same_with_filtered_draw() -> None:
    logits = random_logits(3, 300)
    logits[1] = torch.nan
    sequences = [Sampled(SamplingParams(temperature=1, seed=i, logprobs=2)) for i in range(3)]
    own = sample_batch(logits, sequences)
    provided = sample_batch(logits, sequences, sampler=Sampler(filtered_draw=filtered_draw))
    assert set(own.errors) == set(provided.errors) == {1}
    assert [own.tolist()[i] for i in (0, 2)] == [provided.tolist()[i] for i in (0, 2)]
    assert own.logprobs[0].token_ids == provided.logprobs[0].token_ids


def test_the_block_size_is_that_of_the_caller() -> None:
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0, 4.0, 0.0, 0.0, 0.0]])
    half, last = torch.tensor([0.45]), torch.tensor([0.9])
    assert draw(weights, half, last, 2).item() == 3
    assert draw(weights, half, last, 4).item() == 3
    assert draw(weights, half, last, 1).item() == 3
    assert draw(weights, torch.tensor([0.55]), half, 4).item() == 4
    filters = torch.ones(1), torch.tensor([-torch.inf]), torch.tensor([8]), torch.ones(1)
    logits = weights.log()
    assert filtered_draw(logits, logits.amax(1), *filters, half, last, 2).item() == 3
