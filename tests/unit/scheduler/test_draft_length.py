"""The number of draft tokens follows what pays, for each size of batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.scheduler.draft_length import DraftLength

MOST = 8


def decode(
    length: DraftLength, num_rows: int, num_steps: int, acceptance: float, seconds: Callable[[int, int], float]
) -> tuple[list[int], float]:
    """Runs decode steps. Returns the numbers chosen, and the tokens per second.

    Args:
        acceptance: Probability that a draft token is accepted if the one before it is; every row accepts the mean.
        seconds: Time of a step with so many rows and draft tokens of a row.
    """
    chosen, now, proposed, total, spare = [], 0.0, 0, 0, 0.0
    for step in range(num_steps):
        drafts = {row: [1] * proposed for row in range(num_rows)} if proposed else {}
        plan = SchedulerOutput(step, rows=list(range(num_rows)), draft_token_ids=drafts)
        plan.total_num_scheduled_tokens = num_rows * (1 + proposed)
        chosen.append(length.start_step(plan, now))
        now += seconds(num_rows, proposed)
        spare += sum(acceptance**i for i in range(1, proposed + 1))
        accepted, spare = int(spare), spare % 1
        further = {row: [1] * accepted for row in range(num_rows) if accepted}
        length.end_step(plan, ModelRunnerOutput(step, further_token_ids=further), now)
        total += num_rows * (1 + accepted)
        proposed = chosen[-1]
    return chosen, total / now


@pytest.mark.parametrize("num_rows", [1, 32])
def test_drafts_that_cost_nothing_become_as_long_as_possible(num_rows: int) -> None:
    chosen, _ = decode(DraftLength(MOST), num_rows, 400, 0.9, lambda rows, drafts: 1.0)
    assert chosen[-1] == MOST


@pytest.mark.parametrize("num_rows", [1, 32])
def test_drafts_that_are_never_accepted_end(num_rows: int) -> None:
    chosen, _ = decode(DraftLength(MOST), num_rows, 600, 0.0, lambda rows, drafts: 1.0 + 0.1 * drafts)
    assert chosen[-200:].count(0) > 180


def test_a_large_batch_loses_nothing_by_drafts_that_do_not_pay() -> None:
    """Computing dominates there: a draft token costs as much as a token. The loss is below 2 %, from the start on."""
    for num_steps in (64, 128, 512):
        _, speed = decode(DraftLength(MOST), 32, num_steps, 0.7, lambda rows, drafts: 1.0 + 1.0 * drafts)
        assert speed >= 0.98 * 32  # which is the speed without drafts


def test_each_size_of_batch_has_its_own_number() -> None:
    length = DraftLength(MOST)

    def seconds(rows: int, drafts: int) -> float:
        return max(1.0, rows * (1 + drafts) / 16)  # memory bound up to 16 tokens

    single, _ = decode(length, 1, 300, 0.9, seconds)
    many, _ = decode(length, 32, 300, 0.9, seconds)
    again, _ = decode(length, 1, 50, 0.9, seconds)
    assert (single[-1], again[0], sorted(many)[150]) == (MOST, single[-1], 0)


def test_acceptance_that_changes_is_noticed() -> None:
    length = DraftLength(MOST)
    cheap = lambda rows, drafts: 1.0 + 0.05 * drafts  # noqa: E731
    assert decode(length, 1, 200, 0.95, cheap)[0][-1] == MOST
    assert decode(length, 1, 3000, 0.0, cheap)[0][-1] == 0
    assert max(decode(length, 1, 9000, 0.95, cheap)[0][-10:]) == MOST


def test_steps_with_prompts_do_not_count() -> None:
    length = DraftLength(MOST)
    for step in range(500):
        plan = SchedulerOutput(step, rows=[0, 1], total_num_scheduled_tokens=300)
        assert length.start_step(plan, float(step)) == MOST
        length.end_step(plan, ModelRunnerOutput(step), step + (1.0 if step % 2 else 0.1))
