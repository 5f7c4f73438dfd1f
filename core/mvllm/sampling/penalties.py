"""Penalties on tokens that are there already.

For each token in the prompt or the output, first the repetition penalty divides its logit where that is positive and
multiplies it where negative; then `frequency * (times generated) + presence * (generated at all)` is taken off.

Only the tokens that occur are touched: their ids, factors and amounts go to the device as flat lists.
"""

from __future__ import annotations

import numpy as np
import torch


class TokenCounts:
    """How often each distinct token of one sequence was generated; 0 for tokens that only the prompt has.

    Kept up with the history a token at a time, since counting a long history anew in each step would cost more than
    the step.
    """

    def __init__(self) -> None:
        self._slot_of_token: dict[int, int] = {}
        self._token_ids = np.empty(64, dtype=np.int32)
        self._counts = np.zeros(64, dtype=np.int32)
        self._num_counted = 0

    def update(self, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """Counts what was appended since the last call.

        Args:
            token_ids: int32 [num_tokens]; the whole sequence, whose beginning is as it was.
            num_prompt_tokens: How many of them are the prompt.
        """
        done, total = self._num_counted, len(token_ids)
        begin_of_output = min(max(done, num_prompt_tokens), total)
        for token_id in np.unique(token_ids[done:begin_of_output]).tolist():
            self._count(token_id, 0)
        for token_id in token_ids[begin_of_output:].tolist():
            self._count(token_id, 1)
        self._num_counted = total

    def and_then(self, token_ids: np.ndarray, num_prompt_tokens: int) -> TokenCounts:
        """The counts of a longer sequence that may not come to be; arguments as for `update`."""
        longer = TokenCounts()
        longer._slot_of_token = self._slot_of_token.copy()
        longer._token_ids, longer._counts = self._token_ids.copy(), self._counts.copy()
        longer._num_counted = self._num_counted
        longer.update(token_ids, num_prompt_tokens)
        return longer

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [d]: the distinct tokens."""
        return self._token_ids[: len(self._slot_of_token)]

    @property
    def counts(self) -> np.ndarray:
        """int32 [d]: times generated, parallel to `token_ids`."""
        return self._counts[: len(self._slot_of_token)]

    def _count(self, token_id: int, times: int) -> None:
        slot = self._slot_of_token.setdefault(token_id, len(self._slot_of_token))
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[slot] = token_id
        self._counts[slot] += times


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    factors: torch.Tensor,
    amounts: torch.Tensor,
) -> None:
    """Changes `logits` in place.

    Args:
        logits: float32 [n, vocab].
        rows, token_ids: int64 [m]; distinct places in `logits`.
        factors: float32 [m]; repetition penalties.
        amounts: float32 [m]; what to take off after that.
    """
    values = logits[rows, token_ids]
    values = torch.where(values > 0, values / factors, values * factors) - amounts
    largest = torch.finfo(logits.dtype).max
    logits[rows, token_ids] = values.clamp(max=largest)
