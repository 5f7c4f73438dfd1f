"""Grammar masks of the rows of a plan.

A row whose last token is known has its mask in the plan. A row whose last token is in flight is planned too, if workers
support deferred masks (`SchedulerOutput.masks_follow`): they run the model, and sample when the masks arrive.
"""

from __future__ import annotations

from collections.abc import Mapping

from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request

CHEAP_MASK_SECONDS = 0.0005
DEFERRED_CHEAP_SECONDS = 0.025
"""Time for the cheap masks that one step waits for: those of some hundred rows, which advance in every step."""

DEFERRED_MASK_SECONDS = 0.005
"""Time for the other masks that one step waits for. Further rows with grammars wait for their tokens instead."""


class DeferredMasks:
    """Decides which rows are planned before their masks are known.

    Args:
        is_possible: Workers support deferred masks.
    """

    def __init__(self, *, is_possible: bool) -> None:
        self._is_possible = is_possible
        self._seconds_left = self._cheap_seconds_left = 0.0

    def start_plan(self) -> None:
        """Call this before the rows of a plan are chosen."""
        self._seconds_left, self._cheap_seconds_left = DEFERRED_MASK_SECONDS, DEFERRED_CHEAP_SECONDS

    def can_schedule(self, request: Request) -> bool:
        """Whether a request with a grammar can be planned. No side effects."""
        grammar = request.grammar
        assert grammar is not None
        if not grammar.is_ready:
            return False
        if not request.has_token_in_flight:
            return True
        seconds = grammar.expected_seconds
        return self._is_possible and (self._is_cheap(seconds) or seconds <= self._seconds_left)

    def reserve(self, request: Request, plan: SchedulerOutput) -> None:
        """Takes the time of a request's mask that is computed while its step runs. Such a plan has `masks_follow`."""
        grammar = request.grammar
        assert grammar is not None
        if not request.has_token_in_flight:
            return
        if self._is_cheap(grammar.expected_seconds):
            self._cheap_seconds_left -= grammar.expected_seconds
        else:
            self._seconds_left -= grammar.expected_seconds
        plan.masks_follow = True

    def _is_cheap(self, seconds: float) -> bool:
        return seconds <= min(CHEAP_MASK_SECONDS, self._cheap_seconds_left)


def masks_of_batch(batch: list[Request], draft_masks: Mapping[int, list[bytes]] = {}) -> tuple[list[int], bytes]:
    """`mask_rows` and `token_masks` of the requests that sample, for a plan or for `WorkerProtocol.sample_tokens`.

    A request that has ended since the plan was made has no grammar and no mask; its sample is dropped.

    Args:
        draft_masks: Masks behind draft tokens, by row.
    """
    rows: list[int] = []
    masks: list[bytes] = []
    for request in batch:
        if request.grammar is not None and request.has_token_in_flight:
            behind = draft_masks.get(request.row, [])
            rows += [request.row] * (1 + len(behind))
            masks += [request.grammar.mask, *behind]
    return rows, b"".join(masks)
