"""Pipeline transport: hidden states go forward, outputs come back, and tokens are appended before a plan needs them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.messages.requests import PositionLogprobs
from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.worker.pipeline_transport import PipelineTransport
from tests.helpers.thread_ranks import make_groups
from tests.unit.worker.builders import HostRuntime, make_new, make_plan, make_rows


def make_stages(count: int, *, every_rank_answers: bool = False) -> list[PipelineTransport]:
    return [
        PipelineTransport(
            group, HostRuntime(), hidden_size=3, dtype=torch.float32, every_rank_answers=every_rank_answers
        )
        for group in make_groups("pp", count)
    ]


def rows_with(*rows: int):
    table = make_rows()
    table.apply_plan(make_plan({}, new_requests=[make_new(row, [1, 2], [row]) for row in rows]))
    return table


def at(*positions: int) -> np.ndarray:
    return np.array(positions, dtype=np.int64)


def tokens_of(table, row: int) -> list[int]:
    return table.history.token_ids[row, : table.history.num_tokens[row]].tolist()


def test_hidden_states_go_from_stage_to_stage() -> None:
    first, middle, last = make_stages(3)
    assert first.receive_hidden(2) is None
    first.send_hidden(torch.ones(2, 3))
    middle.send_hidden(middle.receive_hidden(2) + 1)
    assert (last.receive_hidden(2) == 2).all()
    assert (first.is_first, first.is_last, middle.is_first, last.is_last) == (True, False, False, True)


def test_a_profile_run_of_one_stage_needs_no_other_stage() -> None:
    first, last = make_stages(2)
    assert first.zero_hidden_states(4) is None
    assert last.zero_hidden_states(4).shape == (4, 3)


@pytest.mark.parametrize("touch", [{"rows": True}, {"freed": True}])
def test_tokens_are_received_when_a_plan_contains_their_row(touch) -> None:
    first, last = make_stages(2)
    table = rows_with(0, 1)
    first.expect_output(0, at(0, 1), at(0, 1))
    last.send_output(ModelRunnerOutput(step=0, sampled_token_ids=[40, 41]), any_sampled=True)
    first.apply_pending_outputs(make_plan({2: 1}, step=1), table)
    assert tokens_of(table, 1) == [1, 2], "a plan of other rows does not wait"
    first.apply_pending_outputs(
        make_plan({1: 1}, step=2) if touch.get("rows") else make_plan({}, step=2, freed_rows=[1]), table
    )
    assert (tokens_of(table, 0), tokens_of(table, 1)) == ([1, 2, 40], [1, 2, 41])


def test_earlier_outputs_are_received_first_and_later_ones_stay_pending() -> None:
    first, last = make_stages(2)
    table = rows_with(0, 1, 2)
    for step, row in enumerate((0, 1, 2)):
        first.expect_output(step, at(row), at(0))
        last.send_output(ModelRunnerOutput(step=step, sampled_token_ids=[50 + row]), any_sampled=True)
    first.apply_pending_outputs(make_plan({1: 1}, step=3), table)
    assert [tokens_of(table, row)[2:] for row in range(3)] == [[50], [51], []]


def test_only_rows_that_sample_get_a_token() -> None:
    first, last = make_stages(2)
    table = rows_with(0, 1)
    first.expect_output(0, at(1, 0), at(1))
    last.send_output(ModelRunnerOutput(step=0, sampled_token_ids=[-1, 9]), any_sampled=True)
    first.apply_pending_outputs(make_plan({0: 1}, step=1), table)
    assert (tokens_of(table, 0), tokens_of(table, 1)) == ([1, 2, 9], [1, 2])


def test_a_step_that_samples_nothing_is_not_sent() -> None:
    first, last = make_stages(2)
    table = rows_with(0)
    first.expect_output(0, at(0), at())
    last.send_output(ModelRunnerOutput(step=0, sampled_token_ids=[-1]), any_sampled=False)
    first.apply_pending_outputs(make_plan({0: 1}, step=1), table)
    assert tokens_of(table, 0) == [1, 2]


@pytest.mark.parametrize("num_logprobs", [1, 3000])
def test_a_rank_that_answers_receives_the_whole_output(num_logprobs: int) -> None:
    first, last = make_stages(2, every_rank_answers=True)
    table = rows_with(0)
    entry = PositionLogprobs(list(range(num_logprobs)), [-0.5] * num_logprobs, 1)
    output = ModelRunnerOutput(
        step=0, sampled_token_ids=[7], logprobs={0: entry}, prompt_logprobs={0: [entry]}, errors={0: "not a number"}
    )
    first.expect_output(0, at(0), at(0))
    last.send_output(output, any_sampled=True)
    assert first.collect_output(0, table) == output
    assert tokens_of(table, 0) == [1, 2, 7]


def test_empty_steps_and_steps_received_early_are_answered_too() -> None:
    first, last = make_stages(2, every_rank_answers=True)
    table = rows_with(0)
    first.expect_output(0, at(0), at(0))
    first.skip_step(1)
    last.send_output(ModelRunnerOutput(step=0, sampled_token_ids=[7]), any_sampled=True)
    first.apply_pending_outputs(make_plan({0: 1}, step=2), table)
    assert first.collect_output(0, table).sampled_token_ids == [7]
    assert first.collect_output(1, table) == ModelRunnerOutput(step=1)


def test_one_core_for_all_ranks_needs_only_the_tokens_and_keeps_nothing() -> None:
    first, last = make_stages(2)
    table = rows_with(0)
    first.expect_output(0, at(0), at(0))
    first.skip_step(1)
    entry = PositionLogprobs([7], [-0.5], 1)
    last.send_output(ModelRunnerOutput(step=0, sampled_token_ids=[7], logprobs={0: entry}), any_sampled=True)
    first.apply_pending_outputs(make_plan({0: 1}, step=2), table)
    assert not first._outputs and not first._awaited_steps


def test_the_output_is_sent_to_all_earlier_stages() -> None:
    *others, last = make_stages(3)
    for stage in others:
        stage.expect_output(0, at(0), at(0))
    last.send_output(ModelRunnerOutput(step=0, sampled_token_ids=[8]), any_sampled=True)
    for stage in others:
        table = rows_with(0)
        stage.apply_pending_outputs(make_plan({0: 1}, step=1), table)
        assert tokens_of(table, 0) == [1, 2, 8]
