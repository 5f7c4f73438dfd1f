"""Which tokens may come next in one sequence.

Tokens that end the sequence stand outside of the grammar. They may come where the text is complete, if `min_tokens`
does not forbid it; and where nothing can follow, nothing else may. Then one of them ends the sequence in any case,
`ignore_eos` or not. Where the text is not complete they may come only as text, and only if the grammar has nothing else
to go on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mvllm.structured_output.vocabulary import one_line


class SequenceGrammar:
    """A place in a grammar, and the mask that belongs to it.

    Args:
        matcher: The library's, at its beginning; its own.
        end_ids: Tokens that end the sequence.
        special_ids: Tokens that the library takes for the end of a text, whether or not they end the sequence.
        min_tokens: No token of `end_ids` before this many others, unless nothing else can follow.

    Attributes:
        mask: Bits of the tokens that may come next, see `SchedulerOutput.token_masks`.
        is_complete: The last token has ended the sequence.
        error: Why it cannot go on, if it cannot.
    """

    def __init__(self, matcher: Any, *, end_ids: Sequence[int], special_ids: Sequence[int], min_tokens: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._special_ids = special_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._nothing_follows = False
        self.mask = b""
        self.is_complete = False
        self.error: str | None = None
        self._look()

    def accept(self, token: int) -> None:
        """Goes on to the next position. Costs as much as making its mask."""
        if self._nothing_follows:
            self.is_complete = True
        elif self._matcher.consume_token(token):
            self._num_tokens += 1
            self._look()
        else:
            self._fail(f"token {token} cannot come next: {self._reason()}")

    def _look(self) -> None:
        """Makes the mask of this position."""
        matcher = self._matcher
        bits = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            self._fail(self._reason())
            return
        is_match = matcher.is_accepting()
        if is_match:
            _without_bits(bits, self._special_ids)  # they are not of the text
        before = bytes(bits)
        _without_bits(bits, self._end_ids)
        goes_on = _has_bits(bits)
        if is_match and not goes_on:
            self._nothing_follows = True
            self.mask = bytes(_with_bits(bits, self._end_ids or self._special_ids))
        elif is_match and self._num_tokens >= self._min_tokens:
            self.mask = bytes(_with_bits(bits, self._end_ids))
        elif goes_on:
            self.mask = bytes(bits)
        elif _has_bits(before):
            self.mask = before  # what ends the sequence is all that the grammar takes
        else:
            self._fail("no token of the model's vocabulary can come next")

    def _reason(self) -> str:
        return one_line(self._matcher.get_error()) or "the grammar forbids it"

    def _fail(self, reason: str) -> None:
        self.error = f"The output cannot be kept in the form that structured_outputs asks for: {reason}"


def _with_bits(bits: bytearray, token_ids: Sequence[int]) -> bytearray:
    for token in token_ids:
        bits[token >> 3] |= 1 << (token & 7)
    return bits


def _without_bits(bits: bytearray, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        bits[token >> 3] &= ~(1 << (token & 7))


def _has_bits(bits: bytes | bytearray) -> bool:
    return bits.count(0) < len(bits)
