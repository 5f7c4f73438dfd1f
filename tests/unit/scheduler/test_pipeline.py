"""Plans for a pipeline: as many steps in flight as stages, and each request in one of them."""

from __future__ import annotations

import pytest

from mvllm.messages.requests import FinishReason
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens

depths = pytest.mark.parametrize("depth", [1, 2, 3, 4])


def make_engine(depth: int, **settings: object) -> Engine:
    """An engine that makes plans until `depth` of them are in flight."""
    return Engine(make_scheduler(num_stages=depth, **settings), depth=depth)


def rows_in_flight(engine: Engine) -> list[int]:
    return [row for plan, _ in engine.in_flight for row in plan.rows]


@depths
def test_no_request_is_in_two_steps_at_a_time(depth):
    engine = make_engine(depth)
    engine.add(*[make_request(3 + i, max_tokens=9) for i in range(7)])
    while engine.scheduler.has_requests():
        plan = engine.scheduler.schedule()
        assert not set(plan.rows) & set(rows_in_flight(engine))
        engine.in_flight.append((plan, engine.runner.execute(plan)))
        while len(engine.in_flight) >= depth:
            engine.collect()


@depths
def test_decoding_requests_are_spread_over_the_steps(depth):
    engine = make_engine(depth, max_num_seqs=12)
    engine.add(*[make_request(3, max_tokens=30) for _ in range(12)])
    sizes = [len(engine.step().rows) for _ in range(5 * depth)]
    assert sizes[-depth:] == [12 // depth] * depth


@depths
def test_steps_stay_balanced_when_some_requests_end(depth):
    engine = make_engine(depth, max_num_seqs=12)
    engine.add(*[make_request(3, max_tokens=10 if i < 4 else 50) for i in range(12)])
    for _ in range(20 * depth):
        engine.step()
    sizes = [len(engine.step().rows) for _ in range(depth)]
    assert sum(sizes) == 8 and max(sizes) - min(sizes) <= 1


@depths
def test_a_prompt_is_chunked_over_successive_steps(depth):
    engine = make_engine(depth, max_num_batched_tokens=4)
    engine.add(make_request(12, max_tokens=2))
    assert [engine.step().num_scheduled_tokens for _ in range(3)] == [[4], [4], [4]]


def test_a_long_prompt_does_not_keep_others_from_generating():
    engine = make_engine(2, max_num_batched_tokens=6, max_num_seqs=4)
    engine.add(*[make_request(2, max_tokens=20) for _ in range(2)])
    for _ in range(4):
        engine.step()
    engine.add(make_request(40, max_tokens=2))
    num_decodes = [sum(count == 1 for count in engine.step().num_scheduled_tokens) for _ in range(6)]
    assert min(num_decodes) >= 1


@depths
@pytest.mark.parametrize("num_blocks", [64, 7])
def test_tokens_do_not_depend_on_the_number_of_stages(depth, num_blocks):
    engine = make_engine(depth, num_blocks=num_blocks)
    requests = [make_request(4 + i % 3, max_tokens=10) for i in range(9)]
    for request, result in zip(requests, engine.run(*requests), strict=True):
        assert result.token_ids == expected_tokens(request.prompt_token_ids, request.sampling_params, [], 64)
        assert result.finish_reason is FinishReason.LENGTH
    assert bool(engine.scheduler.make_stats().num_preemptions) == (num_blocks == 7)


@depths
def test_an_aborted_request_does_not_change_steps_in_flight(depth):
    engine = make_engine(depth)
    requests = [make_request(4, request_id=name, max_tokens=10) for name in "abc"]
    engine.add(*requests)
    for _ in range(3):
        engine.step()
    engine.scheduler.abort_requests(["b"])
    engine.run()
    for request in (requests[0], requests[2]):
        expected = expected_tokens(request.prompt_token_ids, request.sampling_params, [], 64)
        assert engine.results[request.request_id].token_ids == expected
