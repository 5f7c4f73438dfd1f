"""Rows with one token besides draft tokens precede all others in every plan."""

from __future__ import annotations

import pytest

from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.scheduler.step import decodes_first


@pytest.mark.parametrize(
    ("num_scheduled", "drafts", "order"),
    [
        ([1, 1, 1], {}, [0, 1, 2]),
        ([1, 1, 7], {}, [0, 1, 2]),
        ([7, 1, 5, 1], {}, [1, 3, 0, 2]),
        ([3, 4, 1, 3], {0: [8, 9], 3: [5]}, [0, 2, 1, 3]),
        ([6, 3], {1: [8, 9]}, [1, 0]),
        ([9], {}, [0]),
    ],
)
def test_the_order_of_rows_is_kept_among_decodes_and_among_others(num_scheduled, drafts, order):
    rows = [10 + i for i in range(len(num_scheduled))]
    plan = SchedulerOutput(step=0, rows=rows, num_scheduled_tokens=num_scheduled, draft_token_ids=drafts)
    batch = decodes_first(plan, [f"request {i}" for i in range(len(rows))])  # type: ignore[misc]
    assert plan.rows == [10 + i for i in order]
    assert plan.num_scheduled_tokens == [num_scheduled[i] for i in order]
    assert {order[position]: tokens for position, tokens in plan.draft_token_ids.items()} == drafts
    assert batch == [f"request {i}" for i in order]
