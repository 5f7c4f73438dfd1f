"""Which tokens the rows of a plan may choose, where a grammar says."""

from __future__ import annotations

from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request


def add_masks(plan: SchedulerOutput, batch: list[Request]) -> None:
    """Says which tokens those may choose who sample in this step and may not choose every one."""
    masked = [request for request in batch if request.grammar is not None and request.has_token_in_flight]
    plan.mask_rows = [request.row for request in masked]
    plan.token_masks = b"".join(request.grammar.mask for request in masked if request.grammar is not None)
