"""SMP: core's sampler on the device follows the distribution of the logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.ops.dtypes import torch_dtype
from mvllm.plugin_api import DeviceRuntime
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.sampling.sampling_state import SamplingState
from mvllm.sampling.token_history import TokenHistory
from mvllm.testing.markers import clause, exhaustive
from mvllm.testing.tensor_assertions import assert_equal

VOCABULARY = 64
DRAWS = 4096
SETTINGS: dict[str, dict[str, float | int]] = {
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.5},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
}


def sample(
    runtime: DeviceRuntime, logits: torch.Tensor, params: list[SamplingParams], *, static: bool = False
) -> SamplerOutput:
    """Samples one token per row of logits, which are on the host; rows without params are padding."""
    rows = len(params)
    state, history = SamplingState(rows, logits.shape[1], 0), TokenHistory(rows, 8)
    for row, one in enumerate(params):
        history.set_row(row, [1, 2, 3], 3)
        state.set_row(row, one, eos_token_ids=[], request_id=f"request {row}", num_prompt_tokens=3)
    with runtime.inference_mode():
        return Sampler(static=static).sample(runtime.to_device(logits), np.arange(rows), state, history)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def probabilities(logits: torch.Tensor, settings: dict[str, float | int]) -> np.ndarray:
    """The exact distribution in float64: temperature, then top-k, top-p and min-p."""
    p = torch.softmax(logits.double() / settings["temperature"], dim=-1).numpy()
    order = np.argsort(-p)
    kept = np.ones(len(p), dtype=bool)
    if "top_k" in settings:
        kept[order[int(settings["top_k"]) :]] = False
    if "top_p" in settings:
        before = np.cumsum(p[order]) - p[order]
        kept[order[before >= settings["top_p"]]] = False
    if "min_p" in settings:
        kept &= p >= settings["min_p"] * p.max()
    p = np.where(kept, p, 0)
    return np.asarray(p / p.sum())


@clause("SMP-01")
def test_greedy_takes_a_token_of_largest_logit(bound_device: DeviceRuntime, claimed_dtype: str) -> None:
    logits = random_logits(33).to(torch_dtype(claimed_dtype))
    found = torch.tensor(sample(bound_device, logits, [SamplingParams(temperature=0)] * 33).tolist())
    taken = logits.gather(1, found.view(-1, 1)).flatten()
    assert_equal(taken, logits.max(dim=1).values, "logits of the greedy tokens, by row")


@clause("SMP-02")
@pytest.mark.parametrize(
    "settings", [pytest.param(s, marks=() if s in ("plain", "top_p") else exhaustive) for s in SETTINGS]
)
def test_draws_follow_the_distribution(bound_device: DeviceRuntime, settings: str) -> None:
    logits = random_logits(1)
    params = [SamplingParams(seed=i, max_tokens=1, **SETTINGS[settings]) for i in range(DRAWS)]  # type: ignore[arg-type]
    drawn = sample(bound_device, logits.expand(DRAWS, -1).contiguous(), params).tolist()
    counts = np.bincount(drawn, minlength=VOCABULARY)
    p = probabilities(logits[0], SETTINGS[settings])
    assert counts[p == 0].sum() == 0, "a filtered token was drawn"
    # Each count is binomial: allow six standard deviations, and 6 draws of rare tokens.
    allowed = 6 * np.sqrt(DRAWS * p * (1 - p)) + 6
    worst = int(np.argmax(np.abs(counts - DRAWS * p) - allowed))
    assert abs(counts[worst] - DRAWS * p[worst]) <= allowed[worst], (
        f"token {worst} has probability {p[worst]:.4f} and was drawn {counts[worst]} times out of {DRAWS}"
    )


@clause("SMP-03")
def test_log_probabilities_are_exact(bound_device: DeviceRuntime, claimed_dtype: str) -> None:
    logits = random_logits(9).to(torch_dtype(claimed_dtype))
    output = sample(bound_device, logits, [SamplingParams(temperature=0, logprobs=5)] * 9)
    tokens, exact = output.tolist(), torch.log_softmax(logits.double(), dim=-1)
    for row, entry in output.logprobs.items():
        assert tokens[row] in entry.token_ids
        assert len(set(entry.token_ids)) >= 5
        for token, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            assert math.isclose(logprob, float(exact[row, token]), abs_tol=1e-4)
    assert len(output.logprobs) == 9


@clause("SMP-04")
def test_a_seed_gives_the_same_token_in_any_company(bound_device: DeviceRuntime) -> None:
    logits = random_logits(12)
    params = [SamplingParams(temperature=1.0, seed=100 + i) for i in range(12)]
    together = sample(bound_device, logits, params).tolist()
    alone = [sample(bound_device, logits[i : i + 1], params[i : i + 1]).tolist()[0] for i in range(12)]
    assert together == alone


@clause("SMP-04")
def test_a_row_without_a_usable_logit_is_an_error_of_its_own(bound_device: DeviceRuntime) -> None:
    logits = random_logits(4)
    expected = logits.argmax(dim=1).tolist()
    logits[2] = math.nan
    output = sample(bound_device, logits, [SamplingParams(temperature=0)] * 4)
    tokens = output.tolist()
    assert set(output.errors) == {2}
    assert [tokens[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]
