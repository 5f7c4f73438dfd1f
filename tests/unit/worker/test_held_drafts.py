"""Draft tokens take the places of the placeholders in the next plan of their rows."""

from __future__ import annotations

from mvllm.messages.scheduler_output import PLACEHOLDER, SchedulerOutput
from mvllm.worker.spec_decode.held_drafts import HeldDrafts

THREE = [PLACEHOLDER] * 3


def make_plan(**changes: object) -> SchedulerOutput:
    plan = SchedulerOutput(4, rows=[2, 0, 5], num_scheduled_tokens=[4, 4, 7], total_num_scheduled_tokens=15)
    plan.draft_token_ids = {0: THREE, 1: THREE}
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


def test_each_row_gets_its_own_drafts_up_to_the_number_of_placeholders() -> None:
    held = HeldDrafts()
    held.hold({0: [7], 2: [8, 9, 10, 11], 5: [1]})
    plan = make_plan()
    filled = held.fill(plan)
    assert filled.draft_token_ids == {0: [8, 9, 10], 1: [7]}
    assert (filled.num_scheduled_tokens, filled.total_num_scheduled_tokens) == ([4, 2, 7], 13)
    assert plan == make_plan(), "the scheduler's plan stays as it is"


def test_a_row_without_drafts_computes_its_token_alone() -> None:
    held = HeldDrafts()
    held.hold({0: [7], 2: [8]})
    held.drop([2, 9])
    filled = held.fill(make_plan())
    assert (filled.draft_token_ids, filled.num_scheduled_tokens) == ({1: [7]}, [1, 2, 7])


def test_drafts_that_the_scheduler_knows_stay() -> None:
    held = HeldDrafts()
    held.hold({0: [7], 2: [8]})
    known = make_plan(draft_token_ids={0: [5, 6, 7]})
    assert held.fill(known) is known
    mixed = make_plan(draft_token_ids={0: [5, 6, 7], 1: THREE})
    assert held.fill(mixed).draft_token_ids == {0: [5, 6, 7], 1: [7]}
