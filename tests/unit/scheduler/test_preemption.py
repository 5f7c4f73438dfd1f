"""Preemption when memory runs short: which request is preempted, and that tokens do not change."""

import pytest

from mvllm.messages.requests import FinishReason
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens, logprobs_of


def add_until_preemption(engine: Engine, *requests):
    """Adds requests and steps until the first preemption. Returns the ids of the running requests."""
    engine.add(*requests)
    while not engine.scheduler.make_stats().num_preemptions:
        engine.step()
    return [row.data.request_id for row in engine.runner.rows.values()]


def assert_as_expected(requests, results):
    for request, result in zip(requests, results, strict=True):
        params = request.sampling_params
        assert result.token_ids == expected_tokens(request.prompt_token_ids, params, request.eos_token_ids, 64)


def test_the_newest_request_is_preempted():
    engine = Engine(make_scheduler(num_blocks=7, block_size=4))
    requests = [make_request(4, request_id=name, max_tokens=10, priority=-i) for i, name in enumerate("abc")]
    assert add_until_preemption(engine, *requests) == ["a", "b"]
    assert engine.scheduler.num_waiting == 1


def test_under_the_priority_policy_the_least_important_request_is_preempted():
    engine = Engine(make_scheduler(num_blocks=7, block_size=4, policy="priority"))
    priorities = {"a": 5, "b": 1, "c": 1}
    requests = [make_request(4, request_id=name, max_tokens=10, priority=p) for name, p in priorities.items()]
    assert sorted(add_until_preemption(engine, *requests)) == ["b", "c"]


def test_of_equally_important_requests_the_newest_is_preempted():
    engine = Engine(make_scheduler(num_blocks=7, block_size=4, policy="priority"))
    requests = [make_request(4, request_id=name, max_tokens=10, priority=3) for name in "abc"]
    assert sorted(add_until_preemption(engine, *requests)) == ["a", "b"]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_request_is_admitted_in_the_step_of_a_preemption(depth):
    engine = Engine(make_scheduler(num_blocks=8, block_size=4), depth=depth)
    requests = [make_request(n, request_id=name, max_tokens=9) for n, name in ((4, "old"), (20, "long"), (1, "late"))]
    assert add_until_preemption(engine, *requests) == ["old"]
    assert engine.last_plan.new_requests == []  # although there is enough room for "late"
    joined = []
    while engine.scheduler.num_waiting:
        joined.extend(data.request_id for data in engine.step().new_requests)
    assert joined == ["long", "late"]


def test_a_request_is_admitted_only_if_each_running_one_can_grow_by_a_block():
    for num_blocks, num_running in ((7, 1), (8, 2)):
        engine = Engine(make_scheduler(num_blocks=num_blocks, block_size=4))
        engine.add(make_request(6, max_tokens=2), make_request(19, max_tokens=2))
        engine.step()
        assert engine.scheduler.num_running == num_running


def test_a_preempted_request_frees_its_row_in_the_same_plan():
    engine = Engine(make_scheduler(num_blocks=7, block_size=4))
    add_until_preemption(engine, *[make_request(4, max_tokens=10) for _ in range(3)])
    assert engine.last_plan.freed_rows == [2]


def test_a_preempted_request_resumes_before_newer_ones_with_all_its_tokens():
    engine = Engine(make_scheduler(num_blocks=7, block_size=4, max_num_seqs=3))
    requests = [make_request(4, request_id=name, max_tokens=8) for name in "abcd"]
    add_until_preemption(engine, *requests)
    so_far = list(engine.results["c"].token_ids)
    while not engine.last_plan.new_requests:
        engine.step()
    data = engine.last_plan.new_requests[0]
    assert data.request_id == "c"
    assert data.token_ids == requests[2].prompt_token_ids + so_far
    assert data.num_prompt_tokens == 4
    engine.run()
    assert_as_expected(requests, [engine.results[request.request_id] for request in requests])


def test_a_preempted_request_reuses_its_cached_blocks():
    engine = Engine(make_scheduler(num_blocks=7, block_size=4))
    add_until_preemption(engine, *[make_request(8, request_id=name, max_tokens=6) for name in "ab"])
    while not engine.last_plan.new_requests:
        engine.step()
    assert engine.last_plan.new_requests[0].num_computed_tokens > 0


def test_the_number_of_cached_tokens_is_not_changed_by_a_preemption():
    engine = Engine(make_scheduler(num_blocks=7, block_size=4))
    results = engine.run(*[make_request(8, max_tokens=6) for _ in range(2)])
    assert engine.scheduler.make_stats().num_preemptions
    assert [result.num_cached_tokens for result in results] == [0, 0]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [16, 18, 20])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunked", [{"max_num_batched_tokens": 5}, {"enable_chunked_prefill": False}])
def test_tokens_are_the_same_with_and_without_preemption(depth, num_blocks, policy, chunked):
    engine = Engine(make_scheduler(num_blocks=num_blocks, policy=policy, **chunked), depth=depth)
    prompts = [[100 * i + j for j in range(3 * i + 1)] for i in range(14)]
    requests = [
        make_request(prompt, max_tokens=20, priority=-i % 3, eos=[i], logprobs=1) for i, prompt in enumerate(prompts)
    ]
    results = engine.run(*requests)
    assert engine.scheduler.make_stats().num_preemptions > 0
    assert_as_expected(requests, results)
    for result in results:
        assert result.logprobs == [logprobs_of(token) for token in result.token_ids]


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt(depth):
    engine = Engine(make_scheduler(num_blocks=11, block_size=4, max_num_batched_tokens=4), depth=depth)
    old, new = make_request(12, max_tokens=20), make_request(22, request_id="new", prompt_logprobs=1)
    engine.add(old)
    for _ in range(4):
        engine.step()
    engine.add(new)
    engine.run()
    assert engine.scheduler.make_stats().num_preemptions == 1
    results = [engine.results[request.request_id] for request in (old, new)]
    assert_as_expected([old, new], results)
    assert results[1].prompt_logprobs == [logprobs_of(token) for token in new.prompt_token_ids[1:]]
    assert engine.runner.num_computed["new"] > 22  # it did compute some positions twice


def test_the_oldest_request_always_progresses():
    """However small the cache, each request ends: no two requests preempt each other forever."""
    engine = Engine(make_scheduler(num_blocks=8, block_size=2, max_num_batched_tokens=8, max_model_len=16))
    requests = [make_request(6, max_tokens=10) for _ in range(12)]
    results = engine.run(*requests, max_steps=400)
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
