"""InputBatch: rows of new requests, appended blocks, and rows that are reused."""

from __future__ import annotations

import numpy as np
import pytest

from mvllm.messages.pooling_params import PoolingParams
from tests.unit.worker.builders import make_new, make_plan, make_rows


def test_a_new_request_fills_its_row_and_no_other():
    rows = make_rows()
    rows.apply_plan(make_plan({2: 3}, new_requests=[make_new(2, [11, 12, 13, 14], [5, 9], num_prompt=3, computed=1)]))
    assert rows.history.token_ids[2, :4].tolist() == [11, 12, 13, 14]
    assert (rows.history.num_tokens[2], rows.history.num_prompt_tokens[2], rows.num_computed[2]) == (4, 3, 1)
    assert (rows.block_table[2, :2].tolist(), rows.num_blocks[2]) == ([5, 9], 2)
    assert rows.history.num_tokens.tolist() == [0, 0, 4, 0]
    assert rows.num_blocks.tolist() == [0, 0, 2, 0]


def test_new_blocks_are_appended_in_the_order_of_the_plan():
    rows = make_rows()
    begin = [make_new(0, [1], [3]), make_new(1, [2], [4])]
    rows.apply_plan(make_plan({0: 1, 1: 1}, new_requests=begin))
    rows.apply_plan(make_plan({0: 1, 1: 1}, new_block_rows=[1, 0, 1], new_block_ids=[7, 8, 6]))
    assert rows.block_table[0, :2].tolist() == [3, 8]
    assert rows.block_table[1, :3].tolist() == [4, 7, 6]
    assert rows.num_blocks.tolist() == [2, 3, 0, 0]


def test_a_row_freed_and_allocated_in_one_plan_belongs_to_the_new_request():
    rows = make_rows()
    first = make_new(1, [1, 2, 3], [3, 4], temperature=0.5, logprobs=3, prompt_logprobs=2, presence_penalty=1.0)
    rows.apply_plan(make_plan({1: 3}, new_requests=[first]))
    assert rows.prompt_logprobs == {1: 2}
    rows.apply_plan(make_plan({1: 1}, freed_rows=[1], new_requests=[make_new(1, [9], [8], temperature=0)]))
    assert (rows.history.num_tokens[1], rows.num_blocks[1], rows.num_computed[1]) == (1, 1, 0)
    assert rows.block_table[1, 0] == 8
    assert rows.prompt_logprobs == {}
    assert (rows.sampling.flags[1], rows.sampling.num_logprobs[1], rows.sampling.counts) == (0, 0, {})


def test_a_freed_row_is_empty():
    rows = make_rows()
    rows.apply_plan(make_plan({0: 2}, new_requests=[make_new(0, [1, 2], [3], prompt_logprobs=1, min_tokens=2)]))
    rows.apply_plan(make_plan({}, freed_rows=[0]))
    assert (rows.history.num_tokens[0], rows.num_blocks[0]) == (0, 0)
    assert rows.prompt_logprobs == {} and rows.sampling.end_tokens == {}


def test_a_resumed_request_has_all_its_tokens():
    rows = make_rows()
    rows.apply_plan(make_plan({0: 5}, new_requests=[make_new(0, [1, 2, 3, 4, 5], [6, 7], num_prompt=2, min_tokens=4)]))
    assert (rows.history.num_tokens[0], rows.history.num_prompt_tokens[0]) == (5, 2)
    assert rows.sampling.min_length[0] == 2 + 4, "counted from the prompt, not from where it was resumed"


def test_the_table_has_room_for_the_longest_sequence():
    rows = make_rows(max_model_len=15)
    assert rows.max_pages == 4
    rows.apply_plan(make_plan({0: 15}, new_requests=[make_new(0, list(range(15)), [1, 2, 3, 4])]))
    assert rows.block_table[0, :4].tolist() == [1, 2, 3, 4]


def test_each_group_of_layers_has_a_table_of_its_own():
    rows = make_rows(num_groups=3)
    begin = [make_new(1, [1] * 5, [3, 4], [5, 6], [7]), make_new(2, [2], [8], [9], [10])]
    rows.apply_plan(make_plan({1: 5, 2: 1}, new_requests=begin))
    rows.apply_plan(make_plan({1: 1}, new_block_rows=[1, 9, 5, 9], new_block_ids=[11, 12, 13, 14]))
    assert [rows.block_table[1 + 4 * group, :3].tolist() for group in range(3)] == [[3, 4, 11], [5, 6, 13], [7, 12, 14]]
    assert rows.num_blocks.reshape(3, 4).tolist() == [[0, 3, 1, 0], [0, 3, 1, 0], [0, 3, 1, 0]]
    rows.apply_plan(make_plan({}, freed_rows=[1]))
    assert rows.num_blocks.reshape(3, 4).tolist() == [[0, 0, 1, 0]] * 3


@pytest.mark.parametrize("far", [False, True])
def test_a_failed_step_leaves_rows_with_the_lengths_that_later_plans_assume(far):
    rows = make_rows()
    begin = [make_new(0, [1, 2, 3, 4], [3]), make_new(1, [5, 6], [4]), make_new(3, [7], [5])]
    plan = make_plan({0: 3, 1: 2}, new_requests=begin)
    rows.apply_plan(plan)
    before = rows.copy_lengths()
    if far:  # the row had sampled, and failed after that
        rows.num_computed[[0, 1]] += [3, 2]
        rows.append_sampled_tokens(np.array([1]), np.array([9]), {})
    rows.advance_past_failed_step(plan, before)
    assert rows.num_computed.tolist() == [3, 2, 0, 0]
    assert rows.history.num_tokens.tolist() == [4, 3, 0, 1]
    assert rows.history.token_ids[1, :3].tolist() == [5, 6, 0], "a token that every model has"


def test_draft_tokens_of_a_failed_step_do_not_count_and_a_pooling_row_gets_no_token():
    rows = make_rows()
    begin = [make_new(0, [1, 2], [3], computed=1), make_new(2, [4, 5], [4])]
    begin[1].pooling_params = PoolingParams()
    plan = make_plan({0: 3, 2: 2}, new_requests=begin, draft_token_ids={0: [8, 8]})
    rows.apply_plan(plan)
    rows.advance_past_failed_step(plan, rows.copy_lengths())
    assert rows.num_computed.tolist() == [2, 0, 2, 0]
    assert rows.history.num_tokens.tolist() == [3, 0, 2, 0]
