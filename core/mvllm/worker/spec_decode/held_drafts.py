"""Draft tokens that wait on the worker for the next step of their rows.

With asynchronous scheduling a step is planned before the draft tokens are known that it verifies. Its plan has
placeholders for them (`SchedulerOutput.draft_token_ids`), which are replaced when the step begins:

    step N      row 4 samples x, then the proposer gives a b        held: {4: [a, b]}
    plan N+1    row 4, placeholders . . . .                         made while step N runs
    step N+1    computes x a b                                      2 of at most 4 draft tokens

Every rank that samples proposes for itself, and all ranks hold the same drafts.

In models with sequence states the plan of step N+1 says BEHIND_ACCEPTED where the row has draft tokens in step N: it
reads the slot behind the last token that step N has accepted, which is held, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mvllm.messages.scheduler_output import BEHIND_ACCEPTED, PLACEHOLDER, SchedulerOutput


class HeldDrafts:
    """The draft tokens that were proposed after the last step of each row, and the slot with its state."""

    def __init__(self) -> None:
        self._drafts: dict[int, list[int]] = {}
        self._slots: dict[int, int] = {}

    def hold(self, drafts: Mapping[int, list[int]]) -> None:
        """Holds draft tokens, by row."""
        self._drafts.update(drafts)

    def hold_slots(self, plan: SchedulerOutput, accepted: Mapping[int, Sequence[int]]) -> None:
        """Holds the slot with the state of each row of a step in a model with sequence states.

        Args:
            plan: The step's plan, without placeholders.
            accepted: The accepted draft tokens by position in the batch.
        """
        self._slots.update(zip(plan.rows, plan.write_slots))
        for position, tokens in accepted.items():
            if tokens and position in plan.draft_slots:
                self._slots[plan.rows[position]] = plan.draft_slots[position][len(tokens) - 1]

    def drop(self, rows: Iterable[int]) -> None:
        """Drops what is held of rows that compute, or have ended."""
        for row in rows:
            self._drafts.pop(row, None)
            self._slots.pop(row, None)

    def fill(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with what is held instead of placeholders; `plan` itself, which never changes, without any."""
        planned = plan.draft_token_ids
        waiting = [position for position, drafts in planned.items() if drafts[0] == PLACEHOLDER]
        if not waiting and BEHIND_ACCEPTED not in plan.read_slots:
            return plan
        drafts, slots, counts = planned.copy(), plan.draft_slots.copy(), plan.num_scheduled_tokens.copy()
        for position in waiting:
            most = len(planned[position])
            drafts[position] = held = self._drafts.get(plan.rows[position], [])[:most]
            counts[position] += len(held) - most
            if position in slots:
                slots[position] = slots[position][: len(held)]
            if not held:
                del drafts[position]
                slots.pop(position, None)
        filled: SchedulerOutput = msgspec.structs.replace(
            plan,
            draft_token_ids=drafts,
            draft_slots=slots,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts),
            read_slots=[  # nothing is held of rows that have failed, and whatever they compute is dropped
                self._slots.get(row, written) if slot == BEHIND_ACCEPTED else slot
                for row, slot, written in zip(plan.rows, plan.read_slots, plan.write_slots)
            ],
        )
        return filled
