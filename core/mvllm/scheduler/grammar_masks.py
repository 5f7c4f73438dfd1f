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

    def can_schedule(self, request: Request, plan: SchedulerOutput) -> bool:
        """Whether a request with a grammar can be planned. If its mask is not known, the plan gets `masks_follow`."""
        grammar = request.grammar
        assert grammar is not None
        if not grammar.is_ready:
            return False
        if not request.has_token_in_flight:
            return True
        if not self._is_possible:
            return False
        seconds = grammar.expected_seconds
        if seconds <= min(CHEAP_MASK_SECONDS, self._cheap_seconds_left):
            self._cheap_seconds_left -= seconds
        elif seconds <= self._seconds_left:
            self._seconds_left -= seconds
        else:
            return False
        plan.masks_follow = True
        return True


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
