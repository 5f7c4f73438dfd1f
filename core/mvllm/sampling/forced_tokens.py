"""Tokens that are sampled in place of any other.

`ForcedTokens` are those that requests force at positions of their output (`forced_token_ids`), such as the ends of an
image's rows. `ThinkingBudgets` end thoughts that have reached the budget of their request (`thinking_token_budget`):

    tokens    prompt | <think> t t t t t </think> a a ...
    position         |         begin     limit = begin + budget

Whether a token is forced depends only on its position or on the tokens before it, so preemption, chunks, draft tokens
and planning ahead change nothing. For each row with a budget the state holds the length at which the tokens have to
be looked at: while the output may still open its thoughts, and from `limit` on. At every other step a row costs one
comparison of arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mvllm.messages.thinking import ThinkingTokens

NEVER = np.iinfo(np.int64).max
NOT_FORCED = -1

_MAX_LEADING_TOKENS = 4
"""Most tokens before the opening tag. They are meant to be white space; their text is not known here."""


@dataclass
class _Row:
    """Thoughts of one request.

    Attributes:
        budget: Most tokens between the tags.
        tokens: The tags as token ids.
        output_start: Length of the prompt.
        begin: Position of the first token of the thoughts; -1 while the output has not opened them.
    """

    budget: int
    tokens: ThinkingTokens
    output_start: int
    begin: int

    @property
    def last_start(self) -> int:
        """The longest sequence at whose end the thoughts may begin."""
        return self.output_start + max(map(len, self.tokens.starts), default=0) + _MAX_LEADING_TOKENS


class ThinkingBudgets:
    """The thinking budgets of the rows of a worker.

    Args:
        max_rows: Rows are 0 to max_rows - 1.

    Attributes:
        check_from: int64 [max_rows]; the sequence length from which the row's tokens are looked at before a token is
            sampled. NEVER if the row has no budget, or its thoughts are over.
    """

    def __init__(self, max_rows: int) -> None:
        self.check_from = np.full(max_rows, NEVER, dtype=np.int64)
        self._rows: dict[int, _Row] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def set_row(self, row: int, budget: int, tokens: ThinkingTokens, num_prompt_tokens: int) -> None:
        """Starts the budget of a request, new or resumed after a preemption."""
        begin = -1 if tokens.starts else num_prompt_tokens
        self._rows[row] = _Row(budget, tokens, num_prompt_tokens, begin)
        shortest = min(map(len, tokens.starts), default=budget)
        self.check_from[row] = num_prompt_tokens + min(shortest, NEVER - num_prompt_tokens)

    def clear_row(self, row: int) -> None:
        """Removes the budget of a row."""
        if self._rows.pop(row, None) is not None:
            self.check_from[row] = NEVER

    def are_due(self, rows: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """bool [n]: for which of `rows` `forced_tokens` looks at the tokens."""
        return seq_lens >= self.check_from[rows]

    def forced_tokens(
        self, rows: np.ndarray, seq_lens: np.ndarray, token_ids: np.ndarray, num_known: np.ndarray
    ) -> np.ndarray | None:
        """The tokens to sample in place of any other.

        Args:
            rows: int [n]: the row of each token to sample.
            seq_lens: int [n]: tokens before that one, draft tokens included.
            token_ids: int [max_rows, max_len]: the tokens of each row.
            num_known: int [max_rows]: how many of them are no draft tokens.

        Returns:
            int64 [n]: token ids, and NOT_FORCED for the other rows; None if no token is forced.
        """
        due = np.flatnonzero(self.are_due(rows, seq_lens))
        forced: np.ndarray | None = None
        for i in due.tolist():
            row, length = int(rows[i]), int(seq_lens[i])
            token = self._forced_token(row, token_ids[row], length, is_known=length <= num_known[row])
            if token != NOT_FORCED:
                if forced is None:
                    forced = np.full(len(rows), NOT_FORCED, dtype=np.int64)
                forced[i] = token
        return forced

    def _forced_token(self, row: int, token_ids: np.ndarray, length: int, *, is_known: bool) -> int:
        """The token forced after the first `length` tokens, or NOT_FORCED.

        Args:
            is_known: None of these is a draft token: what they decide is stored.
        """
        thoughts = self._rows[row]
        begin = thoughts.begin
        if begin < 0:
            begin = _find_start(token_ids[thoughts.output_start : length], thoughts.tokens.starts)
            if begin < 0:
                if is_known and length >= thoughts.last_start:
                    self.check_from[row] = NEVER
                return NOT_FORCED
            begin += thoughts.output_start
            if is_known:
                thoughts.begin = begin
        limit = begin + thoughts.budget
        if length < limit:
            if is_known:
                self.check_from[row] = limit
            return NOT_FORCED
        ends, forced = thoughts.tokens.ends, thoughts.tokens.forced
        if not _contains(token_ids[begin:limit], [*ends, *thoughts.tokens.implicit_ends]):
            # Only a closing tag is completed: thoughts that happen to end like the beginning of a call make no call.
            forced = _rest_of_end(token_ids[begin:limit], ends) or forced
            if length < limit + len(forced):
                return forced[length - limit]
        if is_known:
            self.check_from[row] = NEVER
        return NOT_FORCED


def _find_start(output: np.ndarray, starts: Sequence[Sequence[int]]) -> int:
    """The index behind the opening tag of an output; -1 if it does not begin with one."""
    longest = max(map(len, starts)) + _MAX_LEADING_TOKENS
    head = output[:longest].tolist()
    for at in range(min(len(head), _MAX_LEADING_TOKENS + 1)):
        for start in starts:
            if head[at : at + len(start)] == list(start):
                return at + len(start)
    return -1


def _contains(token_ids: np.ndarray, sequences: Sequence[Sequence[int]]) -> bool:
    """Whether one of the sequences occurs in the tokens."""
    for sequence in sequences:
        places = len(token_ids) - len(sequence) + 1
        if places > 0:
            found = token_ids[:places] == sequence[0]
            for i in range(1, len(sequence)):
                found = found & (token_ids[i : i + places] == sequence[i])
            if found.any():
                return True
    return False


def _rest_of_end(token_ids: np.ndarray, ends: Sequence[Sequence[int]]) -> list[int]:
    """The rest of a closing tag that the last tokens have begun; empty if they have not."""
    best: list[int] = []
    most = 0
    for end in ends:
        for begun in range(min(len(end) - 1, len(token_ids)), most, -1):
            if token_ids[-begun:].tolist() == list(end[:begun]):
                best, most = list(end[begun:]), begun
                break
    return best


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
