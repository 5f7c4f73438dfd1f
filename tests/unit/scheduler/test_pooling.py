"""A pooling request ends when its prompt is computed, in any traffic."""

from __future__ import annotations

import random

import pytest

from mvllm.errors import RequestError
from mvllm.messages.pooling_params import PoolingType
from mvllm.messages.requests import FinishReason
from mvllm.messages.scheduler_output import ModelRunnerOutput
from tests.unit.scheduler.builders import Engine, Result, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens, vector_of

LAST, MEAN, CLS = PoolingType.LAST, PoolingType.MEAN, PoolingType.CLS


def assert_vector(result: Result, prompt: list[int]) -> None:
    [output] = result.outputs
    assert output.finish_reason is FinishReason.STOP and output.new_token_ids == []
    assert output.pooling_output == vector_of(prompt)


@pytest.mark.parametrize("kind", PoolingType)
def test_it_ends_with_its_vector_in_the_step_that_computes_the_last_position(kind: PoolingType) -> None:
    engine = Engine(make_scheduler(max_num_batched_tokens=4))
    request = make_request(10, pooling=kind)
    engine.add(request)
    for planned in (4, 4, 2):
        assert engine.scheduler.has_requests()
        assert engine.step().num_scheduled_tokens == [planned]
    assert not engine.scheduler.has_requests()
    assert_vector(engine.results[request.request_id], request.prompt_token_ids)


def test_a_prompt_may_fill_the_whole_context() -> None:
    engine = Engine(make_scheduler(max_model_len=16, num_blocks=4))
    request = make_request(16, pooling=LAST)
    [result] = engine.run(request)
    assert_vector(result, request.prompt_token_ids)
    with pytest.raises(RequestError, match="at most 16"):
        engine.add(make_request(17, pooling=LAST))
    with pytest.raises(RequestError, match="at most 15"):
        engine.add(make_request(16))


def test_only_last_token_pooling_uses_the_prefix_cache() -> None:
    engine = Engine(make_scheduler())
    prompt = list(range(20))
    engine.run(make_request(prompt))
    for kind, cached in ((LAST, 16), (MEAN, 0), (CLS, 0)):
        request = make_request(prompt, pooling=kind)
        [result] = engine.run(request)
        assert_vector(result, prompt)
        assert result.num_cached_tokens == cached
        assert engine.runner.num_computed[request.request_id] == 20 - cached


def test_blocks_of_a_pooling_request_are_shared_with_generating_requests() -> None:
    engine = Engine(make_scheduler())
    prompt = list(range(20))
    engine.run(make_request(prompt, pooling=MEAN))
    [result] = engine.run(make_request(prompt))
    assert result.num_cached_tokens == 16


def test_a_pooling_request_preempted_within_its_prompt_restarts() -> None:
    engine = Engine(make_scheduler(num_blocks=10, max_num_batched_tokens=4))
    writer, reader = make_request(3, max_tokens=30), make_request(30, pooling=MEAN)
    engine.add(writer)
    engine.step()
    engine.add(reader)
    while engine.scheduler.has_requests():
        engine.step()
    assert engine.scheduler.make_stats().num_preemptions > 0
    assert_vector(engine.results[reader.request_id], reader.prompt_token_ids)
    assert engine.runner.num_computed[reader.request_id] > 30


def test_a_row_that_fails_ends_with_an_error_and_no_vector() -> None:
    engine = Engine(make_scheduler())
    bad, good = make_request(6, pooling=LAST), make_request(6, pooling=LAST)
    engine.runner.failing.add(bad.request_id)
    failed, fine = engine.run(bad, good)
    assert (failed.finish_reason, failed.outputs[0].pooling_output) == (FinishReason.ERROR, None)
    assert_vector(fine, good.prompt_token_ids)


def test_a_worker_that_samples_for_a_pooling_request_is_an_error() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(6, pooling=LAST))
    plan = scheduler.schedule()
    [output] = scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, [7])).outputs
    assert output.finish_reason is FinishReason.ERROR and output.new_token_ids == []
    assert "does not support pooling" in str(output.error)
    scheduler.check_integrity()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_in_random_traffic_every_request_gets_its_result(depth: int, num_stages: int) -> None:
    rng = random.Random(depth * 10 + num_stages)
    scheduler = make_scheduler(num_blocks=14, max_num_batched_tokens=12, max_num_seqs=5, num_stages=num_stages)
    engine = Engine(scheduler, depth=depth)
    shared = list(range(12))
    requests = []
    for _ in range(60):
        prompt = shared[: rng.choice([0, 4, 12])] + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        requests.append(make_request(prompt, max_tokens=25, pooling=rng.choice([None, LAST, MEAN, CLS])))
    aborted = {request.request_id for request in rng.sample(requests, 8)}
    for request in requests:
        engine.add(request)
        if rng.random() < 0.6:
            engine.step()
        if request.request_id in aborted:
            scheduler.abort_requests([request.request_id])
    engine.run()
    assert scheduler.make_stats().num_preemptions > 0
    for request in requests:
        result = engine.results[request.request_id]
        if request.request_id in aborted:
            continue
        if request.pooling_params is not None:
            assert_vector(result, request.prompt_token_ids)
        else:
            assert result.token_ids == expected_tokens(request.prompt_token_ids, request.sampling_params, [], 64)
