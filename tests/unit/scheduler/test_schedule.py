"""The contents of a plan: budget, chunks, rows, order, changes."""

import pytest

from mvllm.errors import ConfigError, RequestError
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens


def test_an_idle_scheduler_makes_an_empty_plan():
    scheduler = make_scheduler()
    assert not scheduler.has_requests()
    plan = scheduler.schedule()
    assert (plan.rows, plan.new_requests, plan.total_num_scheduled_tokens) == ([], [], 0)


def test_steps_are_counted_from_zero():
    engine = Engine(make_scheduler())
    assert [engine.step().step for _ in range(3)] == [0, 1, 2]


def test_a_plan_has_full_data_of_new_requests_and_only_rows_of_others():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request([5, 6, 7], request_id="r", max_tokens=9, eos=[2]))
    [data] = engine.step().new_requests
    assert (data.request_id, data.row, data.token_ids, data.num_prompt_tokens) == ("r", 0, [5, 6, 7], 3)
    assert (data.num_computed_tokens, data.eos_token_ids, data.sampling_params.max_tokens) == (0, [2], 9)
    assert len(data.block_ids) == 1
    plan = engine.step()
    assert (plan.new_requests, plan.rows, plan.num_scheduled_tokens) == ([], [0], [1])


def test_a_plan_is_not_changed_by_later_steps():
    engine = Engine(make_scheduler())
    engine.add(make_request([5, 6, 7]))
    [data] = engine.step().new_requests
    engine.step()
    assert data.token_ids == [5, 6, 7]


def test_blocks_are_added_only_when_a_request_enters_a_new_block():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(3, max_tokens=12))
    plans = [engine.step() for _ in range(10)]
    assert [len(plan.new_block_ids) for plan in plans] == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert plans[2].new_block_rows == [0]


def test_prompts_and_generation_share_a_step():
    engine = Engine(make_scheduler())
    engine.add(make_request(6))
    engine.step()
    engine.add(make_request(5))
    plan = engine.step()
    assert (plan.rows, plan.num_scheduled_tokens) == ([0, 1], [1, 5])


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    engine = Engine(make_scheduler(max_num_batched_tokens=8))
    engine.add(make_request(20, max_tokens=2))
    assert [engine.step().num_scheduled_tokens for _ in range(4)] == [[8], [8], [4], [1]]


def test_decoding_requests_get_the_budget_before_prompts():
    engine = Engine(make_scheduler(max_num_batched_tokens=8))
    engine.add(make_request(4, max_tokens=9))
    engine.step()
    engine.add(make_request(20))
    assert engine.step().num_scheduled_tokens == [1, 7]
    assert engine.step().num_scheduled_tokens == [1, 7]


def test_a_budget_smaller_than_the_batch_serves_the_oldest_first_and_all_in_the_end():
    engine = Engine(make_scheduler(max_num_batched_tokens=3))
    requests = [make_request(2) for _ in range(8)]
    results = engine.run(*requests)
    for request, result in zip(requests, results):
        assert result.token_ids == expected_tokens(request.prompt_token_ids, request.sampling_params, [], 64)


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole():
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64)
    engine = Engine(scheduler)
    engine.add(make_request(40), make_request(30))
    assert engine.step().num_scheduled_tokens == [40]
    assert engine.step().num_scheduled_tokens == [1, 30]


def test_without_chunked_prefill_a_budget_below_the_longest_prompt_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=32 is less than max_model_len=64"):
        make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=32, max_model_len=64)


@pytest.mark.parametrize("wrong", [{"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"policy": "lottery"}])
def test_contradicting_limits_are_refused(wrong):
    with pytest.raises(ConfigError):
        make_scheduler(**wrong)


def test_at_most_max_num_seqs_run_at_once():
    engine = Engine(make_scheduler(max_num_seqs=2))
    engine.add(*[make_request() for _ in range(5)])
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 3)


def test_first_come_first_served():
    engine = Engine(make_scheduler(max_num_seqs=1))
    requests = [make_request(max_tokens=1, priority=-i) for i in range(3)]
    engine.add(*requests)
    served = [engine.step().new_requests[0].request_id for _ in requests]
    assert served == [request.request_id for request in requests]


def test_under_the_priority_policy_the_lowest_number_goes_first_and_the_older_of_equals():
    engine = Engine(make_scheduler(max_num_seqs=1, policy="priority"))
    requests = [make_request(max_tokens=1, priority=p, request_id=name) for p, name in ((2, "c"), (1, "a"), (1, "b"))]
    engine.add(*requests)
    assert [engine.step().new_requests[0].request_id for _ in requests] == ["a", "b", "c"]


def test_the_lowest_free_row_is_used_again():
    engine = Engine(make_scheduler(max_num_seqs=4))
    engine.add(*[make_request(request_id=name, max_tokens=9) for name in "abcd"])
    engine.step()
    engine.scheduler.abort_requests(["c", "b"])
    engine.add(make_request(), make_request())
    plan = engine.step()
    assert sorted(plan.freed_rows) == [1, 2]
    assert [data.row for data in plan.new_requests] == [1, 2]


def test_rows_freed_by_the_last_requests_are_in_the_next_plan():
    engine = Engine(make_scheduler())
    engine.run(make_request(max_tokens=1))
    assert not engine.scheduler.has_requests()
    assert engine.step().freed_rows == [0]
    assert engine.step().freed_rows == []


def test_a_chunked_request_is_admitted_only_with_blocks_for_all_its_tokens():
    engine = Engine(make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=8))
    engine.add(make_request(12, max_tokens=5), make_request(14, max_tokens=5))
    for _ in range(2):
        engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)


def test_a_request_that_does_not_fit_delays_later_ones():
    engine = Engine(make_scheduler(num_blocks=8, block_size=4))
    engine.add(make_request(12, max_tokens=5), make_request(24), make_request(2))
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 2)


def test_an_id_in_use_is_refused_and_can_be_used_again_afterwards():
    engine = Engine(make_scheduler())
    engine.add(make_request(request_id="r"))
    with pytest.raises(RequestError, match="'r' is in use"):
        engine.scheduler.add_request(make_request(request_id="r"))
    engine.run()
    engine.run(make_request(request_id="r"))


@pytest.mark.parametrize("num_tokens", [0, 64, 65])
def test_a_prompt_that_is_empty_or_too_long_is_refused(num_tokens):
    with pytest.raises(RequestError, match=f"has {num_tokens} tokens"):
        make_scheduler(max_model_len=64).add_request(make_request(num_tokens))


def test_a_prompt_that_leaves_room_for_one_token_is_accepted():
    [result] = Engine(make_scheduler(max_model_len=64)).run(make_request(63, max_tokens=5))
    assert len(result.token_ids) == 1


def test_the_callers_prompt_is_not_changed():
    prompt = [1, 2, 3]
    Engine(make_scheduler()).run(make_request(prompt))
    assert prompt == [1, 2, 3]
