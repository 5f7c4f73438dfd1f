"""Log-probabilities and ranks equal those of torch's log_softmax in float64."""

from __future__ import annotations

import pytest
import torch

from mvllm.config.engine_settings import LOGPROBS_MODES
from mvllm.messages.sampling_params import SamplingParams
from mvllm.sampling import logprobs as logprobs_module
from mvllm.sampling.logprobs import gather_prompt_logprobs, read_prompt_logprobs
from mvllm.sampling.sampler import Sampler
from tests.unit.sampling.builders import Sampled, random_logits, sample_batch

VOCAB = 500


def check_logprobs(entry, logits: torch.Tensor, token_id: int, num_logprobs: int) -> None:
    exact = logits.double().log_softmax(0)
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    assert entry.token_ids == [token_id, *order[:num_logprobs]]
    assert entry.logprobs == pytest.approx([float(exact[i]) for i in entry.token_ids], abs=1e-5)
    assert entry.rank == 1 + int((logits > logits[token_id]).sum())


def prompt_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> list:
    gathered = gather_prompt_logprobs(logits, token_ids, num_logprobs)
    return read_prompt_logprobs(gathered.numpy(), token_ids.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("asked", "given"), [(0, 0), (1, 1), (20, 20), (-1, VOCAB), (VOCAB, VOCAB), (VOCAB + 9, VOCAB)]
)
def test_logprobs_of_a_prompt(dtype, asked, given):
    logits = random_logits(7, VOCAB).to(dtype)
    token_ids = torch.tensor([0, 499, 3, 3, 250, 77, 1])
    found = prompt_logprobs(logits, token_ids, asked)
    assert len(found) == 7
    for entry, row, token_id in zip(found, logits, token_ids.tolist(), strict=True):
        check_logprobs(entry, row, token_id, given)


def test_logprobs_of_a_long_prompt_are_computed_in_chunks(monkeypatch):
    logits, token_ids = random_logits(50, VOCAB), torch.arange(50)
    whole = prompt_logprobs(logits, token_ids, 4)
    monkeypatch.setattr(logprobs_module, "_CHUNK_ELEMENTS", 7 * VOCAB)
    assert prompt_logprobs(logits, token_ids, 4) == whole


def test_logprobs_of_an_empty_chunk_of_a_prompt():
    assert prompt_logprobs(torch.empty(0, VOCAB), torch.empty(0, dtype=torch.int64), 3) == []


def test_each_row_has_the_requested_number():
    logits = random_logits(5, VOCAB, seed=2)
    asked = [None, 0, 3, -1, 20]
    sequences = [Sampled(SamplingParams(temperature=i % 2, seed=i, logprobs=k)) for i, k in enumerate(asked)]
    sampled = sample_batch(logits, sequences)
    assert set(sampled.logprobs) == {1, 2, 3, 4}
    for row, entry in sampled.logprobs.items():
        wanted = VOCAB if asked[row] == -1 else asked[row]
        check_logprobs(entry, logits[row], sampled.tolist()[row], wanted)


def test_logprobs_are_those_before_temperature_and_filters():
    logits = random_logits(1, VOCAB, seed=2)
    params = SamplingParams(temperature=0.2, top_k=2, top_p=0.5, seed=1, logprobs=5)
    sampled = sample_batch(logits, [Sampled(params)])
    check_logprobs(sampled.logprobs[0], logits[0], sampled.tolist()[0], 5)


def test_a_greedy_token_has_rank_one_and_is_first_even_with_ties():
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, [30, 100, 101, 400]] = 5.0
    entry = sample_batch(logits, [Sampled(SamplingParams(temperature=0, logprobs=2))]).logprobs[0]
    assert entry.token_ids == [30, 30, 100] and entry.rank == 1


def test_impossible_tokens_have_a_logprob_of_minus_infinity():
    logits = random_logits(1, VOCAB)
    logits[0, 5:] = -torch.inf
    (entry,) = prompt_logprobs(logits, torch.tensor([100]), 6)
    assert entry.rank == 6 and entry.logprobs[0] == -torch.inf and entry.logprobs[-1] == -torch.inf


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_every_logprobs_mode(mode: str, static: bool) -> None:
    """Log-probabilities of the model, after bias and penalties, after temperature, and after filters."""
    logits = random_logits(5, VOCAB, seed=5)
    kept = logits.clone()
    params = [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=0, logprobs=3, logit_bias={7: 50.0}),
        SamplingParams(temperature=0.5, logprobs=3, top_k=2, seed=1),
        SamplingParams(temperature=2.0, logprobs=3, seed=1),
        SamplingParams(
            temperature=0.7,
            logprobs=3,
            seed=1,
            top_p=0.6,
            logit_bias={11: 4.0},
            presence_penalty=1.5,
            allowed_token_ids=[*range(100)],
        ),
    ]
    sequences = [Sampled(each, request_id=str(i)) for i, each in enumerate(params)]
    sequences[4].output = [3, 11]
    found = sample_batch(logits, sequences, sampler=Sampler(logprobs_mode=mode, static=static))
    assert torch.equal(logits, kept) and found.tolist()[1] == 7
    stage, _, kind = mode.rpartition("_")
    if stage != "raw":
        logits[1, 7] += 50.0
        logits[4, 11] += 4.0
        logits[4, [3, 11]] -= 1.5
        logits[4, 100:] = -torch.inf
    if stage in ("post_temperature", "processed"):
        logits /= torch.tensor([1.0, 1.0, 0.5, 2.0, 0.7]).unsqueeze(1)
    if stage == "processed":
        logits[2] = logits[2].where(logits[2] >= logits[2].topk(2).values[1], -torch.inf)
        ordered = logits[4].sort(descending=True)
        dropped = ordered.values.softmax(0).cumsum(0).roll(1)
        dropped[0] = 0.0
        logits[4, ordered.indices[dropped >= 0.6]] = -torch.inf
    expected = logits if kind == "logits" else logits.log_softmax(1)
    for i, token in enumerate(found.tolist()):
        entry = found.logprobs[i]
        assert entry.token_ids[0] == token and entry.rank == 1 + int((logits[i] > logits[i, token]).sum())
        assert entry.logprobs == pytest.approx(expected[i, entry.token_ids].tolist(), abs=1e-4)
        assert entry.logprobs[1:] == pytest.approx(expected[i].topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_the_logprob_of_the_sampled_token_alone_needs_no_top_k(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the vocabulary was searched or sorted")

    params = [SamplingParams(temperature=t, seed=1, logprobs=0) for t in (0.0, 0.7, 1.0)]
    sequences = [Sampled(each, request_id=str(i)) for i, each in enumerate(params)]
    logits = random_logits(3, VOCAB)
    for name in ("topk", "sort", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    found = sample_batch(logits, sequences, sampler=Sampler(logprobs_mode=mode))
    prompt = prompt_logprobs(logits, torch.tensor(found.tolist()), 0)
    for i, token in enumerate(found.tolist()):
        assert found.logprobs[i].token_ids == prompt[i].token_ids == [token]
        assert prompt[i].logprobs == pytest.approx([float(logits[i].log_softmax(0)[token])], abs=1e-5)
