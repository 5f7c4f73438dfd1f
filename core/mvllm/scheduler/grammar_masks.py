"""Grammar masks of the rows of a plan.

A row whose last token is known has its mask in the plan. A row whose last token is in flight is planned too, if workers
support deferred masks (`SchedulerOutput.masks_follow`): they run the model, and sample when the masks arrive.
"""

from __future__ import annotations

from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request

DEFERRED_MASK_SECONDS = 0.005
"""Time for the masks that one step waits for. Other rows with grammars wait for their tokens instead."""


class DeferredMasks:
    """Decides which rows are planned before their masks are known.

    Args:
        is_possible: Workers support deferred masks.
    """

    def __init__(self, *, is_possible: bool) -> None:
        self._is_possible = is_possible
        self._seconds_left = 0.0

    def start_plan(self) -> None:
        """Call this before the rows of a plan are chosen."""
        self._seconds_left = DEFERRED_MASK_SECONDS

    def can_schedule(self, request: Request, plan: SchedulerOutput) -> bool:
        """Whether a request with a grammar can be planned. If its mask is not known, the plan gets `masks_follow`."""
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
    """`mask_rows` and `token_masks` of the requests that sample, for a plan or for `WorkerProtocol.sample_tokens`.

    A request that has ended since the plan was made has no grammar and no mask; its sample is dropped.
    """
    masked = [request for request in batch if request.grammar is not None and request.has_token_in_flight]
    masks = [request.grammar.mask for request in masked if request.grammar is not None]
    return [request.row for request in masked], b"".join(masks)
