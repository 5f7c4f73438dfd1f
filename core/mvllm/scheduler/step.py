"""The step being planned: which requests compute how many tokens, and what is left of the budget.

Planning collects rows here. `commit` then counts the planned work as done, once for all of them. Until then a request's
`num_computed_tokens` is where the step begins:

    num_computed_tokens |--------------|
    planned                            |------|           counts[position]
    after commit        |---------------------|
"""

from __future__ import annotations

from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.request import Request


class Step:
    """A plan that is being made.

    Args:
        number: Of the step.
        budget: Most tokens.

    Attributes:
        plan: The plan. Its rows are complete after `commit`.
        batch: The requests planned so far; of request pairs both sides.
        counts: How many known tokens each of them computes.
        budget: Tokens that are left.
        held_back: Running requests that got fewer tokens than they have to compute, with the position in the batch of
            each side; -1 for a side that got none.
        draft_masks: Grammar masks behind draft tokens, by row.
    """

    __slots__ = ("_most", "batch", "budget", "counts", "draft_masks", "held_back", "plan")

    def __init__(self, number: int, budget: int) -> None:
        self.plan = SchedulerOutput(step=number)
        self.batch: list[Request] = []
        self.counts = self.plan.num_scheduled_tokens
        self.budget = self._most = budget
        self.held_back: list[tuple[Request, list[int]]] = []
        self.draft_masks: dict[int, list[bytes]] = {}

    @property
    def generates(self) -> bool:
        """Whether a request in the step generates, as far as its numbers of tokens say."""
        return 1 in self.counts or bool(self.plan.draft_token_ids)

    def add(self, side: Request, count: int, drafts: list[int] | None = None, position: int = -1) -> int:
        """Plans tokens of one side of a request. Returns its position in the batch.

        Args:
            count: Known tokens.
            drafts: Draft tokens behind them.
            position: Where it is in the batch; -1 if it is not there.
        """
        self.budget -= count
        if position >= 0:
            self.counts[position] += count
            return position
        self.batch.append(side)
        self.counts.append(count)
        if drafts:
            self.budget -= len(drafts)
            self.plan.draft_token_ids[len(self.batch) - 1] = drafts
        return len(self.batch) - 1

    def commit(self) -> None:
        """Counts the planned tokens as computed, and a sample as a token in flight. Completes the rows of the plan."""
        plan, batch, counts = self.plan, self.batch, self.counts
        for request, count in zip(batch, counts):
            request.num_computed_tokens = end = request.num_computed_tokens + count
            if end == request.num_tokens:
                request.num_tokens = end + 1  # the token that this step samples
        plan.rows = [request.row for request in batch]
        plan.total_num_scheduled_tokens = total = self._most - self.budget
        if total > len(batch):  # otherwise every row computes one token
            for position, drafts in plan.draft_token_ids.items():
                counts[position] += len(drafts)
                batch[position].num_drafts_in_flight += len(drafts)
            self.batch = decodes_first(plan, batch)


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
