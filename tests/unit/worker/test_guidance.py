"""Combined logits and tokens of guided rows, and the columns of token spaces."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvllm.config.token_spaces import TokenSpace
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.worker.guidance import GuidedLogits, GuidedRows
from mvllm.worker.space_logits import RowSpaces, SpaceLogits


def pairs_of(*rows: int) -> tuple[GuidedRows, np.ndarray]:
    """Row 5 is the companion of row 2, and row 0 that of row 7."""
    state = GuidedRows(8)
    for row, scale, guided_row in ((2, 3.0, None), (5, None, 2), (7, 0.5, None), (0, None, 7), (1, None, None)):
        state.set_row(row, scale, guided_row)
    return state, state.pairs_of(np.array(rows))


def test_pairs_are_found_in_any_order_of_the_batch():
    assert pairs_of(5, 1, 2)[1].tolist() == [[2], [0]]
    assert pairs_of(7, 2, 1, 0, 5)[1].tolist() == [[0, 1], [3, 4]]
    assert pairs_of(1)[1].size == 0


def test_a_row_is_no_companion_any_more_once_it_is_cleared():
    state, _ = pairs_of(1)
    assert state.num_pairs == 2
    state.clear_row(5)
    state.set_row(0, None, None)
    state.clear_row(1)
    assert (state.num_pairs, state.pairs_of(np.array([2, 5, 7, 0])).size) == (0, 0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_combined_in_float32(static, dtype):
    state, pairs = pairs_of(7, 2, 1, 0, 5)
    logits = torch.randn(6 if static else 5, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, 30:] = -torch.inf  # outside of the rows' token space
    wide = logits.float().clone()
    scale = state.scale[np.array([7, 2, 1, 0, 5])[pairs[0]]]
    guided = GuidedLogits.combine(logits, pairs, scale, None, static=static)
    expected = wide.clone()
    expected[0, :30] = wide[3, :30] + 0.5 * (wide[0, :30] - wide[3, :30])
    expected[1, :30] = wide[4, :30] + 3.0 * (wide[1, :30] - wide[4, :30])
    assert guided.logits.dtype is torch.float32
    torch.testing.assert_close(guided.logits, expected, rtol=0, atol=0)

    sampled = SamplerOutput(torch.tensor([4, 9, 2, 0, 1]), torch.tensor([1.0, torch.nan, 3.0, 4.0, 5.0]))
    guided.share_tokens(sampled)
    guided.add_conditional_logprobs(sampled, pairs[0], np.array([True, True]))
    assert sampled.tolist() == [4, 9, 2, 4, 9]
    assert set(sampled.errors) == {1, 4}
    assert sampled.read_conditional_logprobs() == {0: pytest.approx(float(wide[0].log_softmax(0)[4]))}


def test_nan_on_one_side_fails_the_pair_alone():
    state, pairs = pairs_of(2, 1, 5)
    logits = torch.zeros(3, 4)
    logits[2, 1] = torch.nan
    guided = GuidedLogits.combine(logits, pairs, state.scale[[2]], None)
    assert guided.logits.isnan().any(dim=1).tolist() == [True, False, True]


SPACES = {
    "inside": TokenSpace("inside", first=2, size=3, has_own_head=False),
    "image": TokenSpace("image", first=6, size=4),
}


class TwoHeads:
    """Logits of text are 0 to 5, plus the row's state; those of images 60 to 63."""

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return torch.arange(6.0) + states

    def compute_space_logits(self, states: torch.Tensor, space: TokenSpace) -> torch.Tensor:
        assert space is SPACES["image"]
        return torch.arange(60.0, 64.0) + states


def test_a_row_has_logits_in_the_columns_of_its_space():
    config = SimpleNamespace(vocab_size=6, num_token_ids=10, token_spaces=SPACES)
    logits = SpaceLogits(config, torch.from_numpy)
    rows = RowSpaces(4, list(SPACES))
    rows.set_row(0, "text")
    rows.set_row(3, "image")
    rows.set_row(1, "inside")
    states = torch.zeros(3, 1)
    text, image, inside = ([-torch.inf] * 10 for _ in range(3))
    text[:6], image[6:], inside[2:5] = [0.0, 1, 2, 3, 4, 5], [60.0, 61, 62, 63], [2.0, 3, 4]
    assert rows.of(np.array([0, 2])) is None
    assert logits.compute(TwoHeads(), states, None).tolist() == [text] * 3
    assert logits.compute(TwoHeads(), states, rows.of(np.array([3, 3, 3]))).tolist() == [image] * 3
    assert logits.compute(TwoHeads(), states, rows.of(np.array([3, 0, 1]))).tolist() == [image, text, inside]
    padded = logits.compute(TwoHeads(), torch.zeros(4, 1), rows.of(np.array([3, 0])))
    assert padded.tolist()[:2] == [image, text]
    assert logits.compute_for(TwoHeads(), states, np.array([4, 7, 9])).tolist() == [text, image, image]
    # A request of the space "inside" scores codes among the codes; others score them in the vocabulary of text.
    scored = logits.compute_for(TwoHeads(), states, np.array([4, 4, 1]), rows.of(np.array([1, 0, 1])))
    assert scored.tolist() == [inside, text, text]
    rows.set_row(3, "text")
    assert rows.of(np.array([3])) is None
