"""Which tokens may come next in one sequence.

Tokens that end the sequence stand outside of the grammar: they may come where the text is complete, and `min_tokens`
does not forbid it; elsewhere only if the grammar itself has nothing else to go on with. A text that nothing can follow
ends the sequence by itself, so models without an end-of-sequence token end, too.
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
        is_complete: Nothing can follow.
        error: Why it cannot go on, if it cannot.
    """

    def __init__(self, matcher: Any, *, end_ids: Sequence[int], special_ids: Sequence[int], min_tokens: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._special_ids = special_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.mask = b""
        self.is_complete = False
        self.error: str | None = None
        self._look()
        if self.is_complete:  # only the empty text matches; it takes a token to say so
            self.is_complete = False
            self.mask = bytes(_with_bits(bytearray(len(matcher.compute_bitmask())), end_ids))
            if not end_ids:
                self.error = "Only the empty text matches what structured_outputs asks for."

    def accept(self, token: int) -> None:
        """Goes on to the next position. Costs as much as making its mask."""
        if not self._matcher.consume_token(token):
            self._fail(f"token {token} cannot come next: {self._reason()}")
            return
        self._num_tokens += 1
        self._look()

    def _look(self) -> None:
        """Makes the mask of this position."""
        matcher = self._matcher
        if matcher.is_stopped() and not matcher.is_error():
            self.is_complete = True
            return
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
            self.is_complete = True
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
