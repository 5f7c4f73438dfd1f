"""Steps that are planned before the results of earlier steps have arrived."""

import pytest

from mvllm.messages.requests import FinishReason
from mvllm.messages.scheduler_output import ModelRunnerOutput
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens

PROMPT = [1, 2, 3, 4, 5]
depths = pytest.mark.parametrize("depth", [2, 3])


@depths
def test_generation_goes_on_while_a_token_is_in_flight(depth):
    engine = Engine(make_scheduler(), depth=depth)
    engine.add(make_request(PROMPT, max_tokens=9))
    assert [engine.step().num_scheduled_tokens for _ in range(4)] == [[5], [1], [1], [1]]


@depths
def test_no_plan_goes_past_max_tokens(depth):
    engine = Engine(make_scheduler(), depth=depth)
    [result] = engine.run(make_request(PROMPT, request_id="r", max_tokens=6))
    assert len(result.token_ids) == 6
    assert engine.runner.num_computed["r"] == 5 + 5  # the last token is never computed


@depths
def test_no_plan_goes_past_max_model_len(depth):
    engine = Engine(make_scheduler(max_model_len=12), depth=depth)
    [result] = engine.run(make_request(PROMPT, request_id="r", max_tokens=None))
    assert len(result.token_ids) == 7
    assert engine.runner.num_computed["r"] == 11


@depths
def test_tokens_planned_beyond_a_stop_are_dropped(depth):
    request = make_request(PROMPT, request_id="r", max_tokens=20)
    free = expected_tokens(PROMPT, request.sampling_params, [], 64)
    request.eos_token_ids = [free[3]]
    engine = Engine(make_scheduler(), depth=depth)
    [result] = engine.run(request)
    assert result.token_ids == free[:4]
    assert result.finish_reason is FinishReason.STOP
    assert engine.runner.num_computed["r"] == 5 + 3 + (depth - 1)


@depths
def test_a_preempted_request_waits_for_its_token_before_it_comes_back(depth):
    engine = Engine(make_scheduler(num_blocks=7, block_size=4), depth=depth)
    requests = [make_request(4, max_tokens=10) for _ in range(3)]
    results = engine.run(*requests)
    assert engine.scheduler.make_stats().num_preemptions
    for request, result in zip(requests, results):
        assert result.token_ids == expected_tokens(request.prompt_token_ids, request.sampling_params, [], 64)


@depths
def test_a_failed_row_is_reported_once_although_later_steps_are_planned(depth):
    engine = Engine(make_scheduler(), depth=depth)
    engine.add(make_request(PROMPT, request_id="r", max_tokens=20))
    engine.step()
    engine.runner.failing = {"r"}
    engine.run()
    assert [output.finish_reason for output in engine.results["r"].outputs] == [None, FinishReason.ERROR]


@depths
def test_a_request_preempted_before_its_failure_is_known_leaves_no_cached_blocks(depth):
    engine = Engine(make_scheduler(num_blocks=7, block_size=4), depth=depth)
    engine.add(*[make_request(4, request_id=name, max_tokens=10) for name in "abc"])
    victim = engine.scheduler.requests.by_id["c"]
    while engine.scheduler.make_stats().num_preemptions == 0:
        plan = engine.scheduler.schedule()
        tokens_before = list(victim.token_ids)
        engine.runner.failing = {"c"}  # reported by the results of plans in flight, if it computes at all
        engine.in_flight.append((plan, engine.runner.execute(plan)))
        engine.runner.failing = set()
        if engine.scheduler.make_stats().num_preemptions or victim.status.name == "FINISHED":
            break
        while len(engine.in_flight) >= depth:
            engine.collect()
    while engine.in_flight:
        engine.collect()
    assert engine.results["c"].finish_reason is FinishReason.ERROR
    engine.run()
    [again] = engine.run(make_request([*tokens_before, 1]))
    assert (again.finish_reason, again.num_cached_tokens) == (FinishReason.LENGTH, 0)


def test_every_plan_may_be_planned_before_any_result_is_back():
    engine = Engine(make_scheduler(), depth=50)
    [result] = engine.run(make_request(PROMPT, max_tokens=20))
    assert result.token_ids == expected_tokens(PROMPT, make_request(max_tokens=20).sampling_params, [], 64)


def test_a_step_without_work_is_not_planned_and_the_next_one_frees_its_rows():
    scheduler = make_scheduler()
    scheduler.add_request(make_request(PROMPT, request_id="a", max_tokens=1))
    first = scheduler.schedule()
    assert scheduler.schedule_unless_empty() is None, "its last token is in flight"
    scheduler.abort_requests(["a"])
    assert scheduler.schedule_unless_empty() is None
    scheduler.add_request(make_request(PROMPT, request_id="b", max_tokens=1))
    second = scheduler.schedule_unless_empty()
    assert second is not None
    assert (first.step, second.step) == (0, 1)
    assert second.freed_rows == [0] and [new.row for new in second.new_requests] == [0]
    for plan in (first, second):
        scheduler.update_from_output(plan, ModelRunnerOutput(step=plan.step, sampled_token_ids=[9]))
    assert not scheduler.has_requests()
    scheduler.check_integrity()
