"""Example logits processor: forbids repeated n-grams in a sequence, prompt included.

LLM(..., logits_processors="no-repeat-ngram")                  lets requests ask for it:
SamplingParams(extra_args={"no_repeat_ngram_size": 3})         this one does
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mvllm.extension_api import LogitsProcessor, LogitsProcessorContext, RowTokens, SamplingParams

if TYPE_CHECKING:
    import torch

ARGUMENT = "no_repeat_ngram_size"


class NoRepeatNgram(LogitsProcessor):
    """Blocks every token that would complete a repeated n-gram. See LogitsProcessor."""

    reads_tokens = True

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self._rows: dict[int, tuple[int, RowTokens]] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Validates the size."""
        size = (params.extra_args or {}).get(ARGUMENT, 1)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 64:
            raise ValueError(f"{ARGUMENT} must be an integer from 1 to 64, got {str(size)[:40]!r}")

    def add_row(self, row: int, params: SamplingParams, tokens: RowTokens) -> bool:
        """Adds a row whose request has a size."""
        size = (params.extra_args or {}).get(ARGUMENT)
        if size is not None:
            self._rows[row] = size, tokens
        return size is not None

    def remove_row(self, row: int) -> None:
        """Removes the row."""
        del self._rows[row]

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Masks the tokens that would repeat an n-gram."""
        for line, row in enumerate(rows):
            size, tokens = self._rows[row]
            blocked = _completions(np.concatenate((tokens.prompt, tokens.output)), size)
            logits[line, blocked.tolist()] = float("-inf")
        return logits


def _completions(token_ids: np.ndarray, size: int) -> np.ndarray:
    """The tokens that followed earlier occurrences of the last `size - 1` tokens."""
    if len(token_ids) < size:
        return token_ids[:0]
    runs = np.lib.stride_tricks.sliding_window_view(token_ids, size)
    last = token_ids[len(token_ids) - size + 1 :]
    return np.unique(runs[(runs[:, :-1] == last).all(axis=1), -1])
