"""The grammar state of one sequence: which tokens may come next.

End tokens (EOS and stop tokens) are not part of the grammar:

    text complete, more text possible    end tokens allowed after `min_tokens`
    text complete, nothing can follow    only end tokens allowed; any of them ends the sequence, even with `ignore_eos`
    text incomplete                      end tokens allowed only as text, if the grammar allows nothing else
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from mvllm.structured_output.mask_worker import MaskTimeBudget, MaskWorker
from mvllm.structured_output.vocabulary import one_line


class _DraftState(NamedTuple):
    """The state behind a draft token, and the processor time of its mask."""

    token: int
    mask: bytes
    must_end: bool
    seconds: float


class SequenceGrammar:
    """The state of a grammar after the tokens of one sequence, and the mask of the next token.

    Args:
        request_id: The sequence's request.
        matcher: The library's matcher at its beginning; not shared.
        first_bits: Tokens that the matcher allows there, in the form of `mask`.
        end_ids: Tokens that end the sequence.
        special_ids: Tokens that the library treats as end of text, whether or not they end the sequence.
        min_tokens: Tokens before any of `end_ids` is allowed, unless nothing else can follow.
        worker: Computes the masks; None computes each at once, however long it takes.
        budget: Processor time of the masks; None for no limit.
        relaxations: What of a JSON schema the grammar does not enforce.

    Attributes:
        is_ready: `mask` is the mask of the next token. While it is False, another thread computes the mask.
        mask: A bit for each token that may come next, see `SchedulerOutput.token_masks`.
        is_complete: The last token has ended the sequence.
        error: Why the sequence has failed, if it has.
        expected_seconds: Estimated processor time of the next mask.
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
        relaxations: tuple[str, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.relaxations = relaxations
        self._matcher = matcher
        self._end_ids = end_ids
        self._special_ids = special_ids
        self._min_tokens = min_tokens
        self._worker = worker
        self._budget = budget
        self._num_tokens = 0
        self._last_token = -1
        self._must_end = False
        self._drafted: deque[_DraftState] = deque()
        self._draft_matcher: Any = None  # behind all tokens of `_drafted`
        self._not_consumed: list[int] = []  # accepted draft tokens that `matcher` has not consumed
        self.is_ready = True
        self.mask = b""
        self.is_complete = False
        self.error: str | None = None
        self.expected_seconds = 0.0
        self._set_mask(first_bits)

    def accept(self, token: int, *, blocking: bool = False) -> None:
        """Advances by one token. The next mask is valid once `is_ready`.

        With `blocking` that is after `MaskWorker.run_deferred`, or on return without a MaskWorker.
        """
        if self._must_end:
            self.is_complete = True
            return
        if self._drafted and self._drafted[0].token == token:
            self._accept_drafted()
            return
        self._leave_draft()
        self._last_token = token
        self.is_ready = False
        if self._worker is None:
            self.compute_mask()
        elif blocking:
            self._worker.defer(self)
        else:
            self._worker.run(self)

    def draft_masks(self, tokens: Sequence[int]) -> list[bytes]:
        """Masks behind each of the leading draft tokens that may be verified in the next step.

        The draft ends before the first token that the grammar refuses, before an end token, which needs no draft (it
        can be sampled behind the token before it), and where masks take too long. `accept` uses the masks of those
        tokens that follow indeed. Only while `is_ready`.

        Args:
            tokens: Draft tokens that would follow the sequence.
        """
        self._leave_draft()
        mask, must_end = self.mask, self._must_end
        for token in tokens:
            if must_end or token in self._end_ids or not _has_bit(mask, token):
                break
            if self._worker is not None and not self._worker.has_draft_time(self.expected_seconds):
                break
            if self._draft_matcher is None:  # errors are final: the sequence's own matcher must not see other tokens'
                self._draft_matcher = self._matcher.deep_copy()  # takes a microsecond
            state = self._draft_state(self._draft_matcher, token)
            if state is None:  # if the token is sampled, `accept` says why
                self._draft_matcher = None
                break
            mask, must_end = state.mask, state.must_end
            self._drafted.append(state)
        return [state.mask for state in self._drafted]

    def _draft_state(self, matcher: Any, token: int) -> _DraftState | None:
        """The state behind one more draft token, which `matcher` consumes; None if the grammar refuses it."""
        start = time.thread_time()
        bits = matcher.compute_bitmask() if matcher.consume_token(token) else b""
        state = None
        if not matcher.is_error():
            state = self._state_of(matcher, bits, self._num_tokens + len(self._drafted) + 1)
        seconds = time.thread_time() - start
        if self._worker is not None:
            self._worker.spend_draft_time(seconds)
            self._expect(seconds)
        return None if state is None else _DraftState(token, *state, seconds)

    def _accept_drafted(self) -> None:
        """Advances by the first draft token, whose mask is known."""
        state = self._drafted.popleft()
        self._num_tokens += 1
        self._not_consumed.append(state.token)
        if not self._drafted and self._draft_matcher is not None:
            self._matcher = self._draft_matcher
            self._not_consumed.clear()
        self.mask, self._must_end = state.mask, state.must_end
        if self._budget is not None:
            self._budget.add_token(state.seconds)

    def _leave_draft(self) -> None:
        """Forgets draft tokens that were not accepted."""
        tokens, self._not_consumed = self._not_consumed, []
        self._drafted.clear()
        self._draft_matcher = None
        if tokens and not self._matcher.consume_tokens(tokens):
            self._fail(self._reason())

    def compute_mask(self) -> None:
        """Consumes the accepted token and computes the next mask. Called by MaskWorker."""
        start = time.thread_time()
        self._advance()
        seconds = time.thread_time() - start
        if self._worker is not None:
            self._expect(seconds)
        budget = self._budget
        if budget is not None and self.error is None:
            budget.add_token(seconds)
            if budget.is_exceeded:
                self._fail(
                    f"computing its token masks has taken {budget.seconds:.1f} s of processor time for "
                    f"{budget.num_tokens} tokens. Write the grammar so that fewer of its rules match the same text"
                )
        self.is_ready = True

    def _expect(self, seconds: float) -> None:
        """Estimates the time of the next mask from that of the last: a slow mask is mostly followed by slow ones."""
        self.expected_seconds = max(seconds, 0.8 * self.expected_seconds)

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
        """Makes the mask from the tokens that the library allows at this position."""
        state = self._state_of(self._matcher, allowed, self._num_tokens)
        if state is None:
            self._fail("no token of the model's vocabulary can come next")
        else:
            self.mask, self._must_end = state

    def _state_of(self, matcher: Any, allowed: bytes, num_tokens: int) -> tuple[bytes, bool] | None:
        """The mask at a matcher's position, and whether the sequence must end there; None if no token can come next.

        Args:
            matcher: Has computed `allowed`.
            allowed: Tokens that the library allows there.
            num_tokens: Tokens before it.
        """
        bits = bytearray(allowed)
        is_match = matcher.is_accepting()
        if is_match:
            _without_bits(bits, self._special_ids)  # they are not part of the text
        before = bytes(bits)
        _without_bits(bits, self._end_ids)
        can_continue = _has_bits(bits)
        if is_match and not can_continue:
            return bytes(_with_bits(bits, self._end_ids or self._special_ids)), True
        if is_match and num_tokens >= self._min_tokens:
            return bytes(_with_bits(bits, self._end_ids)), False
        if can_continue:
            return bytes(bits), False
        return (before, False) if _has_bits(before) else None  # the grammar allows end tokens alone

    def _reason(self) -> str:
        return one_line(self._matcher.get_error()) or "the grammar forbids it"

    def _fail(self, reason: str) -> None:
        self.error = f"The output cannot satisfy structured_outputs: {reason}"


def _with_bits(bits: bytearray, token_ids: Sequence[int]) -> bytearray:
    for token in token_ids:
        bits[token >> 3] |= 1 << (token & 7)
    return bits


def _without_bits(bits: bytearray, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        bits[token >> 3] &= ~(1 << (token & 7))


def _has_bit(bits: bytes, token: int) -> bool:
    return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)


def _has_bits(bits: bytes | bytearray) -> bool:
    return bits != bytes(len(bits))  # a comparison of memory: counting bytes takes ten times as long
