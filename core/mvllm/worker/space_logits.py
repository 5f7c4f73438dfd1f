"""Logits of models with token spaces: one column for each id of all spaces, -inf outside of the row's space.

    num_token_ids   | text ............ | image ......... |
    a text row      | lm_head           | -inf            |
    an image row    | -inf              | its own head    |

So sampling, masks, penalties and log-probabilities work as for text. If the rows of a step are of several spaces, each
head computes all rows: a head reads all of its weights for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from mvllm.config.model import ModelConfig
from mvllm.config.token_spaces import TokenSpace
from mvllm.messages.sampling_params import TEXT


class LogitsModel(Protocol):
    """A model, or its program: computes logits of hidden states [n, hidden_size]."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As CausalLM.compute_logits."""

    def compute_space_logits(self, hidden: torch.Tensor, space: TokenSpace) -> torch.Tensor:
        """As CausalLM.compute_space_logits."""


class SpaceLogits:
    """Computes the logits of one model.

    Args:
        config: The model's configuration; it has token spaces.
        upload: Copies an int32 array of a step to the device.
    """

    def __init__(self, config: ModelConfig, upload: Callable[[np.ndarray], torch.Tensor]) -> None:
        self._vocab_size = config.vocab_size
        self._num_token_ids = config.num_token_ids
        self._spaces = list(config.token_spaces.values())
        self._upload = upload

    def compute(self, model: LogitsModel, states: torch.Tensor, spaces: np.ndarray | None) -> torch.Tensor:
        """Logits of the rows of a step.

        Args:
            model: The model, with its weights.
            states: [n or more, hidden_size].
            spaces: int [n] on the host: the space of each row, from `RowSpaces`; None if all are of text.

        Returns:
            [n or more, num_token_ids], compute dtype.
        """
        present = [0] if spaces is None else np.unique(spaces).tolist()
        logits = self._compute_space(model, states, present[0])
        if spaces is None or len(present) == 1:
            return logits
        padded = np.zeros(len(states), dtype=np.int32)
        padded[: len(spaces)] = spaces
        numbers = self._upload(padded).unsqueeze(1)
        for number in present[1:]:
            logits = torch.where(numbers == number, self._compute_space(model, states, number), logits)
        return logits

    def compute_for(
        self, model: LogitsModel, states: torch.Tensor, token_ids: np.ndarray, spaces: np.ndarray | None = None
    ) -> torch.Tensor:
        """Logits that predict given tokens.

        Tokens of the request's own space are predicted in it, as when the request samples them. Others are predicted by
        their own head, if they have one, or else in the vocabulary of text.

        Args:
            states: [n or more, hidden_size].
            token_ids: int [n] on the host.
            spaces: int [n] on the host: the space of each token's request, as in `compute`.
        """
        numbers = np.zeros(len(token_ids), dtype=np.int32)
        for number, space in enumerate(self._spaces, start=1):
            is_inside = (token_ids >= space.first) & (token_ids < space.stop)
            if space.has_own_head:
                numbers[is_inside] = number
            elif spaces is not None:
                numbers[is_inside & (spaces == number)] = number
        return self.compute(model, states, numbers)

    def _compute_space(self, model: LogitsModel, states: torch.Tensor, number: int) -> torch.Tensor:
        """[n, num_token_ids]: logits of one space for all rows."""
        space = self._spaces[number - 1] if number else None
        if space is None or not space.has_own_head:
            text = model.compute_logits(states)
            logits = F.pad(text, (0, self._num_token_ids - self._vocab_size), value=-torch.inf)
            if space is not None:
                outside = torch.ones(self._num_token_ids, dtype=torch.bool, device=logits.device)
                outside[space.first : space.stop] = False
                logits = logits.masked_fill(outside, -torch.inf)
            return logits
        own = model.compute_space_logits(states, space)
        return F.pad(own, (space.first, self._num_token_ids - space.stop), value=-torch.inf)


class RowSpaces:
    """The space of each row: 0 for text, or 1 and up in the order of `ModelConfig.token_spaces`.

    Args:
        max_rows: Most running requests.
        names: The names of the model's spaces.
    """

    def __init__(self, max_rows: int, names: list[str]) -> None:
        self._names = names
        self._numbers = np.zeros(max_rows, dtype=np.int32)

    def set_row(self, row: int, name: str) -> None:
        """Writes the space of a row's request."""
        if self._names:
            self._numbers[row] = 0 if name == TEXT else 1 + self._names.index(name)

    def of(self, rows: np.ndarray) -> np.ndarray | None:
        """int32 [n]: the spaces of `rows`; None if all are of text."""
        if not self._names:
            return None
        numbers = self._numbers[rows]
        return numbers if numbers.any() else None
