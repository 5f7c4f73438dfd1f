"""Which tokens the rows of a plan may choose, where a grammar says.

A row whose last token is known has its mask with the plan. A row whose last token is still in flight is planned all the
same if workers can take masks later (`SchedulerOutput.masks_follow`): they run the model meanwhile, and sample when the
masks have come.
"""

from __future__ import annotations

from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request

DEFERRED_MASK_SECONDS = 0.005
"""Masks that are computed while a step waits for them, all together. Other rows with grammars wait for their tokens."""


class DeferredMasks:
    """Decides which rows are planned before their masks are known.

    Args:
        is_possible: Whether workers can take masks later.
    """

    def __init__(self, *, is_possible: bool) -> None:
        self._is_possible = is_possible
        self._seconds_left = 0.0

    def start_plan(self) -> None:
        """To be called before the rows of a plan are chosen."""
        self._seconds_left = DEFERRED_MASK_SECONDS

    def can_schedule(self, request: Request, plan: SchedulerOutput) -> bool:
        """Whether a request with a grammar can be part of a plan; if its mask is not known, the plan's masks follow."""
        grammar = request.grammar
        assert grammar is not None
        if not grammar.is_ready:
            return False
        if not request.has_token_in_flight:
            return True
        if not self._is_possible or grammar.expected_seconds > self._seconds_left:
            return False
        self._seconds_left -= grammar.expected_seconds
        plan.masks_follow = True
        return True


def masks_of_batch(batch: list[Request]) -> tuple[list[int], bytes]:
    """The masks of those who sample, for a plan or for `WorkerProtocol.sample_tokens`.

    Who has ended since the plan was made has none any more. What is sampled in its row is dropped.
    """
    masked = [request for request in batch if request.grammar is not None and request.has_token_in_flight]
    masks = [request.grammar.mask for request in masked if request.grammar is not None]
    return [request.row for request in masked], b"".join(masks)
