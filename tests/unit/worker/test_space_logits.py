"""The columns of token spaces in logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from mvllm.config.token_spaces import TokenSpace
from mvllm.worker.space_logits import RowSpaces, SpaceLogits

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
