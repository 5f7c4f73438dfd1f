"""Non-causal spans of the rows' prompts: how far each token of a step sees.

    positions of a row       0  1  2  3  4  5  6  7      span [2, 5)
    visible_lens             1  2  5  5  5  6  7  8

A step that begins in a span holds the rest of it, so no token sees one that is not stored yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mvllm.messages.multimodal import ItemSpan


class NonCausalSpans:
    """The non-causal spans of the rows."""

    def __init__(self) -> None:
        self._of_rows: dict[int, list[tuple[int, int]]] = {}

    def set_row(self, row: int, items: Iterable[ItemSpan]) -> None:
        """Sets the items of a new request, of a model whose images attend in both directions.

        Each run of positions that take embeddings is a span of its own: tokens between frames of a video are causal.
        """
        runs = [
            (item.offset + start, item.offset + stop)
            for item in items
            if not item.is_causal
            for start, stop in item.embedded
            if stop - start > 1
        ]
        if runs:
            self._of_rows[row] = runs

    def clear_row(self, row: int) -> None:
        """Removes the spans of a row."""
        self._of_rows.pop(row, None)

    def visible_lens(
        self, rows: np.ndarray, first: np.ndarray, num_scheduled: np.ndarray, num_padded: int
    ) -> np.ndarray | None:
        """How many leading positions of its sequence each token of a step sees.

        Args:
            rows: int [R]: the rows of the step.
            first: int [R]: position of each row's first token in it.
            num_scheduled: int [R]: tokens of each row in it.
            num_padded: Tokens of the step with padding.

        Returns:
            int32 [num_padded], 0 for padding; None if every token sees the positions up to its own.
        """
        if not self._of_rows:
            return None
        ends = num_scheduled.cumsum()
        starts = ends - num_scheduled
        found: np.ndarray | None = None
        for index, row in enumerate(rows.tolist()):
            begin, end = int(first[index]), int(first[index] + num_scheduled[index])
            for start, stop in self._of_rows.get(row, ()):
                if stop - 1 <= begin or start >= end:
                    continue  # of a span whose last token is the first of the step, that token sees no later one
                assert stop <= end, (
                    f"a step has positions {begin} to {end} of a row, but not the span {start} to {stop}"
                )
                if found is None:
                    found = np.zeros(num_padded, dtype=np.int32)
                    offsets = np.arange(ends[-1]) - starts.repeat(num_scheduled)
                    found[: ends[-1]] = first.repeat(num_scheduled) + offsets + 1
                at = int(starts[index]) - begin
                found[at + max(start, begin) : at + stop] = stop
        return found
