"""Tokens that requests force at positions of their output (`forced_token_ids`), such as the ends of an image's rows.

Whether a token is forced depends only on its position, so preemption, chunks and planning ahead change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mvllm.sampling.thinking_budget import NOT_FORCED


class ForcedTokens:
    """The forced tokens of the rows of a worker."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def set_row(self, row: int, token_ids: Mapping[int, int], num_prompt_tokens: int) -> None:
        """Sets the tokens of a request, by position in its output."""
        self._rows[row] = {num_prompt_tokens + position: token_id for position, token_id in token_ids.items()}

    def clear_row(self, row: int) -> None:
        """Removes the tokens of a row."""
        self._rows.pop(row, None)

    def add_to(self, forced: np.ndarray | None, rows: np.ndarray, seq_lens: np.ndarray) -> np.ndarray | None:
        """Adds forced tokens to those of thinking budgets, which take precedence.

        Args:
            forced: int64 [n]: token ids, and NOT_FORCED for other rows; None if there are none.
            rows: int [n]: the row of each token to sample.
            seq_lens: int [n]: tokens before that one.

        Returns:
            As `forced`.
        """
        for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
            token_id = self._rows.get(row, {}).get(length)
            if token_id is None:
                continue
            if forced is None:
                forced = np.full(len(rows), NOT_FORCED, dtype=np.int64)
            if forced[i] == NOT_FORCED:
                forced[i] = token_id
        return forced
