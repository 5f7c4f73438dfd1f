"""The order of the rows of a step."""

from __future__ import annotations

from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request


def decodes_first(plan: SchedulerOutput, batch: list[Request]) -> list[Request]:
    """Moves rows with one token besides draft tokens to the front, in their order. Returns the reordered batch."""
    num_scheduled, drafts = plan.num_scheduled_tokens, plan.draft_token_ids
    if sum(num_scheduled) == len(num_scheduled) + sum(map(len, drafts.values())):
        return batch  # nothing but decode rows
    is_decode = [num == 1 for num in num_scheduled]
    for position, tokens in drafts.items():
        is_decode[position] = num_scheduled[position] == 1 + len(tokens)
    num_decodes = sum(is_decode)
    if all(is_decode[:num_decodes]):
        return batch
    order = sorted(range(len(batch)), key=is_decode.__getitem__, reverse=True)  # stable, reversed or not
    plan.rows = [plan.rows[i] for i in order]
    plan.num_scheduled_tokens = [num_scheduled[i] for i in order]
    if drafts:
        plan.draft_token_ids = {new: drafts[old] for new, old in enumerate(order) if old in drafts}
    return [batch[i] for i in order]
