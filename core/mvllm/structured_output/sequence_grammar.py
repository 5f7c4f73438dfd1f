"""Which tokens may come next in one sequence.

Tokens that end the sequence stand outside of the grammar. They may come where the text is complete, if `min_tokens`
does not forbid it; and where nothing can follow, nothing else may. Then one of them ends the sequence in any case,
`ignore_eos` or not. Where the text is not complete they may come only as text, and only if the grammar has nothing else
to go on with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mvllm.structured_output.mask_worker import MaskTimeBudget, MaskWorker
from mvllm.structured_output.vocabulary import one_line


class SequenceGrammar:
    """A place in a grammar, and the mask that belongs to it.

    Args:
        request_id: Whose sequence it is.
        matcher: The library's, at its beginning; its own.
        first_bits: What the matcher allows there, as `mask`.
        end_ids: Tokens that end the sequence.
        special_ids: Tokens that the library takes for the end of a text, whether or not they end the sequence.
        min_tokens: No token of `end_ids` before this many others, unless nothing else can follow.
        worker: Has masks computed; None where they are computed at once, however long that takes.
        budget: The work that they may take; None where there is no limit.

    Attributes:
        is_ready: Whether `mask` is that of the next token. Where it is False, another thread is computing it.
        mask: Bits of the tokens that may come next, see `SchedulerOutput.token_masks`.
        is_complete: The last token has ended the sequence.
        error: Why it cannot go on, if it cannot.
        expected_seconds: Processor time that the next mask will take, about.
    """

    def __init__(
        self,
        request_id: str,
        matcher: Any,
        *,
        first_bits: bytes,
        end_ids: Sequence[int],
        special_ids: Sequence[int],
        min_tokens: int,
        worker: MaskWorker | None = None,
        budget: MaskTimeBudget | None = None,
    ) -> None:
        self.request_id = request_id
        self._matcher = matcher
        self._end_ids = end_ids
        self._special_ids = special_ids
        self._min_tokens = min_tokens
        self._worker = worker
        self._budget = budget
        self._num_tokens = 0
        self._last_token = -1
        self._must_end = False
        self.is_ready = True
        self.mask = b""
        self.is_complete = False
        self.error: str | None = None
        self.expected_seconds = 0.0
        self._set_mask(first_bits)

    def accept(self, token: int, *, at_once: bool = False) -> None:
        """Goes on to the next position, whose mask is there when `is_ready` says so; with `at_once`, on return."""
        if self._must_end:
            self.is_complete = True
            return
        self._last_token = token
        self.is_ready = False
        if at_once or self._worker is None:
            self.compute_mask()
        else:
            self._worker.run(self)

    def compute_mask(self) -> None:
        """Takes in the token that was accepted last, and computes the mask behind it. For MaskWorker."""
        start = time.thread_time()
        self._advance()
        seconds = time.thread_time() - start
        if self._worker is not None:  # what was slow once is expected to be slow for some tokens to come
            self.expected_seconds = max(seconds, 0.8 * self.expected_seconds)
        budget = self._budget
        if budget is not None and self.error is None:
            budget.add_token(seconds)
            if budget.is_exceeded:
                self._fail(
                    f"finding out which tokens may come next has taken {budget.seconds:.1f} s of processor time for "
                    f"{budget.num_tokens} tokens. Write the grammar so that fewer of its rules match the same text"
                )
        self.is_ready = True

    def _advance(self) -> None:
        matcher, token = self._matcher, self._last_token
        if not matcher.consume_token(token):
            self._fail(f"token {token} cannot come next: {self._reason()}")
            return
        self._num_tokens += 1
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            self._fail(self._reason())
        else:
            self._set_mask(bits)

    def _set_mask(self, allowed: bytes) -> None:
        """Makes the mask out of what the library allows at this position."""
        bits = bytearray(allowed)
        is_match = self._matcher.is_accepting()
        if is_match:
            _without_bits(bits, self._special_ids)  # they are not of the text
        before = bytes(bits)
        _without_bits(bits, self._end_ids)
        goes_on = _has_bits(bits)
        if is_match and not goes_on:
            self._must_end = True
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
