"""Draft tokens that wait on the worker for the next step of their rows.

With asynchronous scheduling a step is planned before the draft tokens are known that it verifies. Its plan has
placeholders for them (`SchedulerOutput.draft_token_ids`), which are replaced when the step begins:

    step N      row 4 samples x, then the proposer gives a b        held: {4: [a, b]}
    plan N+1    row 4, placeholders . . . .                         made while step N runs
    step N+1    computes x a b                                      2 of at most 4 draft tokens

Every rank that samples proposes for itself, and all ranks hold the same drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from mvllm.messages.scheduler_output import PLACEHOLDER, SchedulerOutput


class HeldDrafts:
    """The draft tokens that were proposed after the last step of each row."""

    def __init__(self) -> None:
        self._drafts: dict[int, list[int]] = {}

    def hold(self, drafts: Mapping[int, list[int]]) -> None:
        """Holds draft tokens, by row."""
        self._drafts.update(drafts)

    def drop(self, rows: Iterable[int]) -> None:
        """Drops the draft tokens of rows that compute, or have ended."""
        for row in rows:
            self._drafts.pop(row, None)

    def fill(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with held draft tokens instead of placeholders; `plan` itself, which never changes, without any."""
        planned = plan.draft_token_ids
        waiting = [position for position, drafts in planned.items() if drafts[0] == PLACEHOLDER]
        if not waiting:
            return plan
        drafts, counts = planned.copy(), plan.num_scheduled_tokens.copy()
        for position in waiting:
            most = len(planned[position])
            drafts[position] = held = self._drafts.get(plan.rows[position], [])[:most]
            counts[position] += len(held) - most
            if not held:
                del drafts[position]
        filled: SchedulerOutput = msgspec.structs.replace(
            plan, draft_token_ids=drafts, num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts)
        )
        return filled
