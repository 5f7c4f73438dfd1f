"""All known tokens of each batch row, in host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PlaceholderTokens:
    """Positions of placeholder ids in a TokenHistory:

    arrays [n] of rows, positions, and `row_generation` of the rows.
    """

    rows: np.ndarray
    positions: np.ndarray
    row_generation: np.ndarray


class TokenHistory:
    """All known tokens of each row: the prompt, then the generated tokens.

    The model runner owns and writes it; sampling reads it. A sampled token that has not been copied from the device
    counts as known. Its place holds the placeholder id `-1 - row` until the token is filled in.

    Attributes:
        token_ids: int32 [max_rows, max_len]; the first `num_tokens` of a row are valid. Draft tokens follow them until
            the step that verifies them is over.
        num_tokens: int32 [max_rows].
        num_prompt_tokens: int32 [max_rows]; length of the prompt.
        row_generation: int64 [max_rows]; how many requests have had the row.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.token_ids = np.zeros((max_rows, max_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_rows, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int32)
        self.row_generation = np.zeros(max_rows, dtype=np.int64)

    def set_row(self, row: int, token_ids: Sequence[int] | np.ndarray, num_prompt_tokens: int) -> None:
        """Starts a row with its known tokens."""
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.row_generation[row] += 1

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Appends one token to each of `rows`, which are distinct."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Appends tokens to one row."""
        begin = self.num_tokens[row]
        self.token_ids[row, begin : begin + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)

    def set_draft_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        """Writes draft tokens behind the tokens of a row, whose number does not change."""
        begin = self.num_tokens[row]
        self.token_ids[row, begin : begin + len(token_ids)] = token_ids

    def append_placeholders(self, rows: np.ndarray) -> PlaceholderTokens:
        """Appends a placeholder to each of `rows`, which are distinct. Pass the result to `fill_placeholders`."""
        places = PlaceholderTokens(rows, self.num_tokens[rows], self.row_generation[rows])
        self.append(rows, -1 - rows)
        return places

    def fill_placeholders(self, places: PlaceholderTokens, token_ids: np.ndarray) -> None:
        """Replaces placeholders by their tokens; rows that belong to another request by now are not changed."""
        same = self.row_generation[places.rows] == places.row_generation
        self.token_ids[places.rows[same], places.positions[same]] = token_ids[same]

    def ends_in_placeholder(self, rows: np.ndarray) -> bool:
        """Whether the last token of any of `rows` is a placeholder."""
        return bool((self.token_ids[rows, self.num_tokens[rows] - 1] < 0).any())

    def clear_row(self, row: int) -> None:
        """Empties a row."""
        self.num_tokens[row] = 0
        self.num_prompt_tokens[row] = 0
