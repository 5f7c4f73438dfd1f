"""Draft tokens in the worker: the tokens that a step computes, its rows of logits, and acceptance."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mvllm.messages.requests import PositionLogprobs
from mvllm.sampling.sampler_output import SamplerOutput
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.step_inputs import StepInputs
from mvllm.worker.step_result import StepResult
from tests.unit.worker.builders import VOCAB_SIZE, as_list, make_builder, make_new, make_plan, make_rows, slots_of

DRAFTS = {0: [50, 51, 52], 2: [60]}
"""By position in the batch."""


def three_rows() -> InputBatch:
    """Rows 3, 1 and 0: the first and the last decode, the other has a chunk of its prompt."""
    rows = make_rows()
    begin = [
        make_new(3, [5, 6, 7, 8, 9], [1, 4], num_prompt=2, computed=4),
        make_new(1, list(range(20, 30)), [9, 2, 6], computed=4),
        make_new(0, [30, 31], [7], num_prompt=1, computed=1),
    ]
    rows.apply_plan(make_plan({}, new_requests=begin))
    return rows


def build(rows: InputBatch) -> StepInputs:
    plan = make_plan({3: 4, 1: 3, 0: 2}, draft_token_ids=DRAFTS)
    rows.apply_plan(plan)
    return make_builder(rows, max_draft_tokens=3).build(plan)


def test_draft_tokens_are_computed_after_the_known_token():
    inputs = build(three_rows())
    assert as_list(inputs.token_ids) == [9, 50, 51, 52, 24, 25, 26, 31, 60]
    assert as_list(inputs.positions) == [4, 5, 6, 7, 4, 5, 6, 1, 2]
    slots = [*slots_of([1, 4], range(4, 8)), *slots_of([9, 2, 6], range(4, 7)), *slots_of([7], range(1, 3))]
    assert as_list(inputs.layout.slot_mapping) == slots
    assert as_list(inputs.layout.seq_lens) == [8, 7, 3]


def test_there_are_logits_for_the_known_token_and_each_draft_token():
    inputs = build(three_rows())
    assert (as_list(inputs.sampling_positions), as_list(inputs.num_draft_tokens)) == ([0, 2], [3, 1])
    assert as_list(inputs.logits_indices) == [0, 1, 2, 3, 7, 8]
    assert as_list(inputs.num_logits_rows) == [4, 2]


def test_a_step_without_draft_tokens_is_unchanged():
    plan = make_plan({3: 1, 0: 1})
    rows = three_rows()
    rows.apply_plan(plan)
    inputs = make_builder(rows, max_draft_tokens=3).build(plan)
    assert (as_list(inputs.logits_indices), as_list(inputs.num_draft_tokens)) == ([0, 1], [0, 0])


def test_draft_tokens_are_not_counted_until_they_are_accepted():
    rows = three_rows()
    build(rows)
    assert rows.history.num_tokens[[3, 1, 0]].tolist() == [5, 10, 2]
    rows.num_computed[[3, 0]] += 1
    rows.append_sampled_tokens(np.array([3, 0]), np.array([50, 77]), {3: [51, 80]})
    assert rows.history.token_ids[3, :8].tolist() == [5, 6, 7, 8, 9, 50, 51, 80]
    assert rows.history.token_ids[0, :3].tolist() == [30, 31, 77]
    assert rows.history.num_tokens[[3, 0]].tolist() == [8, 3]
    assert rows.num_computed[[3, 0]].tolist() == [7, 2]  # up to the token before the last


def result_of(sampled: list[int], failing: dict[int, float] | None = None, *, with_logprobs: bool = False):
    """The output of a step with samples in the order of `logits_indices`; -1 marks a failed row of logits."""
    max_logits = torch.ones(len(sampled))
    for line, peak in (failing or {}).items():
        max_logits[line] = peak
    output = SamplerOutput(torch.tensor(sampled), max_logits)
    if with_logprobs:
        output.logprobs = {  # type: ignore[misc]
            line: PositionLogprobs([token], [-float(line)], 1)
            for line, token in enumerate(sampled)
            if line not in (failing or {})
        }
    step = StepResult(4, np.array([3, 1, 0]), np.array([0, 2]), sampled=output, draft_token_ids=DRAFTS)
    return step.read()


@pytest.mark.parametrize(
    ("sampled", "first", "accepted"),
    [
        ([50, 51, 52, 53, 60, 61], [50, 60], {0: [51, 52, 53], 2: [61]}),
        ([50, 51, 9, 53, 60, 61], [50, 60], {0: [51, 9], 2: [61]}),
        ([50, 9, 52, 53, 9, 61], [50, 9], {0: [9]}),
        ([9, 51, 52, 53, 9, 61], [9, 9], {}),  # a draft token after a rejected one is rejected
    ],
)
def test_draft_tokens_are_accepted_up_to_the_first_mismatch(sampled, first, accepted):
    output, tokens = result_of(sampled, with_logprobs=True)
    assert tokens.tolist() == first
    assert output.sampled_token_ids == [first[0], -1, first[1]]
    assert output.further_token_ids == accepted
    told = {p: [each.token_ids[0] for each in entries] for p, entries in output.further_logprobs.items()}
    assert told == accepted
    assert {p: entry.token_ids for p, entry in output.logprobs.items()} == {0: [first[0]], 2: [first[1]]}


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize(
    ("line", "first", "accepted"), [(1, 50, []), (2, 50, [51]), (3, 50, [51, 52])], ids=["second", "third", "last"]
)
def test_an_error_in_a_logits_row_ends_the_accepted_run_before_it(line, first, accepted, with_logprobs):
    output, tokens = result_of([50, 51, 52, 53, 60, 61], {line: float("nan")}, with_logprobs=with_logprobs)
    assert not output.errors
    assert tokens.tolist() == [first, 60]
    assert output.further_token_ids.get(0, []) == accepted
    assert output.further_token_ids[2] == [61]


def test_an_error_after_a_rejected_draft_token_is_ignored():
    output, tokens = result_of([50, 9, 0, 0, 60, 61], {2: float("nan"), 3: float("-inf")}, with_logprobs=True)
    assert not output.errors and tokens.tolist() == [50, 60] and output.further_token_ids[0] == [9]


def test_an_error_in_the_first_logits_row_fails_only_its_request():
    output, _ = result_of([50, 51, 52, 53, 60, 61], {0: float("nan")}, with_logprobs=True)
    assert list(output.errors) == [0] and "NaN" in output.errors[0]
    assert output.further_token_ids == {2: [61]} and 0 not in output.logprobs


def test_the_largest_step_with_draft_tokens_fits_the_buffer():
    rows = make_rows()
    begin = [make_new(row, [1, 2], [row + 1], num_prompt=1, computed=1) for row in range(4)]
    rows.apply_plan(make_plan({}, new_requests=begin))
    plan = make_plan(dict.fromkeys(range(4), 4), draft_token_ids={row: [VOCAB_SIZE - 1] * 3 for row in range(4)})
    rows.apply_plan(plan)
    builder = make_builder(rows, max_draft_tokens=3)
    reserved = len(builder.staging.buffer(1, torch.int32))
    inputs = builder.build(plan)
    assert len(inputs.logits_indices) == 16 and len(builder.staging.buffer(1, torch.int32)) == reserved
