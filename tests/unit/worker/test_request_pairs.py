"""Combined logits and tokens of request pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.errors import ConfigError
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.scheduler_output import NewRequestData
from mvllm.sampling.logits_combiner import LogitsCombiner, load_combiner
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.worker.request_pairs import PairLogits, PairRows


class Apart(LogitsCombiner):
    """How far the request is from its companion, times a weight."""

    def weight(self, settings: bytes) -> float:
        return float(settings)

    def combine(self, primary: torch.Tensor, companion: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weights * (primary - companion)


class Together(Apart):
    def combine(self, primary: torch.Tensor, companion: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return primary + weights * companion


def data_of(row: int, primary: int | None = None, combiner: str = "", weight: float = 0) -> NewRequestData:
    settings = str(weight).encode()
    return NewRequestData(
        f"r{row}", row, [1], 1, 0, [0], SamplingParams(), [],
        guided_row=primary, combiner=combiner, combiner_settings=settings,
    )  # fmt: skip


def pairs_of(*rows: int, other: str = "apart") -> tuple[PairRows, np.ndarray]:
    """Row 5 is the companion of row 2, and row 0 that of row 7."""
    state = PairRows(8, {"apart": Apart(), "together": Together()}.__getitem__)
    for data in (data_of(2), data_of(5, 2, "apart", 3), data_of(7), data_of(0, 7, other, 0.5), data_of(1)):
        state.set_row(data)
    return state, state.pairs_of(np.array(rows))


def combine(logits: torch.Tensor, state: PairRows, rows: list[int], static: bool = False) -> PairLogits:
    pairs = state.pairs_of(np.array(rows))
    companions = np.array(rows)[pairs[1]]
    weights, groups = state.weight[companions], state.groups_of(companions)
    return PairLogits.combine(logits, pairs, weights, groups, None, static=static)


def test_pairs_are_found_in_any_order_of_the_batch():
    assert pairs_of(5, 1, 2)[1].tolist() == [[2], [0]]
    assert pairs_of(7, 2, 1, 0, 5)[1].tolist() == [[0, 1], [3, 4]]
    assert pairs_of(1)[1].size == 0


def test_pairs_are_in_the_order_of_their_combiners():
    state, pairs = pairs_of(7, 2, 1, 0, 5, other="together")
    assert pairs.tolist() == [[1, 0], [4, 3]]
    assert [(type(each), count) for each, count in state.groups_of(np.array([5, 0]))] == [(Apart, 1), (Together, 1)]


def test_a_row_is_no_companion_any_more_once_it_is_cleared():
    state, _ = pairs_of(1)
    assert state.num_pairs == 2
    state.clear_row(5)
    state.set_row(data_of(0))
    state.clear_row(1)
    assert (state.num_pairs, state.pairs_of(np.array([2, 5, 7, 0])).size) == (0, 0)


@pytest.mark.parametrize("other", ["apart", "together"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_combined_in_float32(static, dtype, other):
    rows = [7, 2, 1, 0, 5]
    state, pairs = pairs_of(*rows, other=other)
    logits = torch.randn(6 if static else 5, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, 30:] = -torch.inf  # outside of the rows' token space
    wide = logits.float().clone()
    combined = combine(logits, state, rows, static)
    expected = wide.clone()
    expected[0, :30] = 0.5 * (wide[0, :30] - wide[3, :30]) if other == "apart" else wide[0, :30] + 0.5 * wide[3, :30]
    expected[1, :30] = 3.0 * (wide[1, :30] - wide[4, :30])
    assert combined.logits.dtype is torch.float32
    torch.testing.assert_close(combined.logits, expected, rtol=0, atol=0)

    sampled = SamplerOutput(torch.tensor([4, 9, 2, 0, 1]), torch.tensor([1.0, torch.nan, 3.0, 4.0, 5.0]))
    combined.share_tokens(sampled)
    combined.add_conditional_logprobs(sampled, pairs[0], np.array([True, True]))
    assert sampled.tolist() == [4, 9, 2, 4, 9]
    assert set(sampled.errors) == {1, 4}
    assert sampled.read_conditional_logprobs() == {0: pytest.approx(float(wide[0].log_softmax(0)[4]))}


def test_nan_on_one_side_fails_the_pair_alone():
    state, _ = pairs_of(2, 1, 5)
    logits = torch.zeros(3, 4)
    logits[2, 1] = torch.nan
    assert combine(logits, state, [2, 1, 5]).logits.isnan().any(dim=1).tolist() == [True, False, True]


def test_a_combiner_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="logits combiner 'nowhere'"):
        load_combiner("nowhere")
