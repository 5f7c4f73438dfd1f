"""Request pairs: both sides are admitted, scheduled, preempted and freed together, and sample in the same step.

The fake runner raises if one side samples alone. Random traffic with request pairs is in `test_random_traffic.py`.
"""

from __future__ import annotations

import pytest

from mvllm.errors import RequestError
from mvllm.messages.requests import FinishReason
from mvllm.messages.sampling_params import RequestOutputKind
from mvllm.scheduler.request_pairs import split_tokens
from tests.unit.scheduler.builders import Engine, companion_prompt, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens

PROMPT, OTHER = list(range(100, 109)), list(range(200, 221))


def paired(prompt: list[int] = PROMPT, other: list[int] = OTHER, **settings: object):
    return make_request(prompt, companion=other, **settings)


def tokens_of(request, max_model_len: int = 64) -> list[int]:
    other = companion_prompt(request)
    return expected_tokens(
        request.prompt_token_ids, request.sampling_params, request.eos_token_ids, max_model_len, companion=other
    )


def num_free(engine: Engine) -> int:
    return engine.scheduler._kv_cache.num_free_blocks


@pytest.mark.parametrize("budget", range(1, 8))
@pytest.mark.parametrize(("left", "other"), [(1, 1), (1, 5), (5, 1), (4, 4), (2, 3)])
def test_no_side_reaches_its_last_token_alone(left, other, budget):
    first, second = split_tokens([left, other], budget, [99, 99])
    assert first + second <= budget
    assert (first == left) == (second == other) == (left + other <= budget)
    assert first + second == budget or (left - first, other - second) in ((0, 0), (1, 1))  # no token is left unused


@pytest.mark.parametrize("budget", [2, 3, 5, 7, 31, 64])
def test_chunks_of_both_sides_end_in_the_same_step(budget):
    engine = Engine(make_scheduler(max_num_batched_tokens=budget))
    request, ordinary = paired(max_tokens=6), make_request(9)
    found = engine.run(request, ordinary)
    assert found[0].token_ids == tokens_of(request)
    assert found[1].token_ids == tokens_of(ordinary)
    assert num_free(engine) == 64


def test_both_sides_count_as_rows():
    engine = Engine(make_scheduler(max_num_seqs=3))
    engine.add(paired(), paired(), make_request())
    plan = engine.step()
    assert len(plan.new_requests) == 2, "neither a second pair nor what is behind it"
    assert plan.new_requests[1].guided_row == plan.new_requests[0].row
    assert plan.num_scheduled_tokens == [9, 21]
    assert engine.scheduler.num_running == 1


def test_an_output_contains_the_tokens_of_one_side():
    engine = Engine(make_scheduler())
    request = paired(max_tokens=5, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    result = engine.run(request)[0]
    assert len(result.outputs) == 1
    assert result.token_ids == tokens_of(request)
    assert result.conditional_logprobs == [-0.5 * token for token in result.token_ids]
    stats = engine.scheduler.make_stats()
    assert (stats.num_generated_tokens, stats.num_prompt_tokens) == (5, len(PROMPT))


def test_siblings_share_prompt_blocks_on_both_sides():
    for enable_caching in (True, False):
        engine = Engine(make_scheduler(enable_caching=enable_caching))
        engine.add(*(paired(sibling_group="g", max_tokens=3) for _ in range(3)))
        plan = engine.step()
        first, other = plan.new_requests[0], plan.new_requests[1]
        for start in (2, 4):
            sibling, companion = plan.new_requests[start], plan.new_requests[start + 1]
            assert (sibling.num_computed_tokens, companion.num_computed_tokens) == (8, 20)
            assert sibling.block_ids[:2] == first.block_ids[:2]
            assert companion.block_ids[:5] == other.block_ids[:5]


def test_each_side_finds_its_own_prefix():
    engine = Engine(make_scheduler())
    engine.run(paired(other=[1] * 5))
    again = paired(prompt=[*PROMPT[:6], 7, 8, 9])
    engine.add(again)
    plan = engine.step()
    assert [each.num_computed_tokens for each in plan.new_requests] == [4, 0]
    assert engine.run(paired())[0].num_cached_tokens == 8


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preemption_frees_both_sides(depth, policy):
    engine = Engine(make_scheduler(num_blocks=20, policy=policy), depth=depth)
    requests = [paired(PROMPT[i:], OTHER[i:], max_tokens=20, priority=-i) for i in range(3)]
    found = engine.run(*requests, make_request(max_tokens=20))
    assert engine.scheduler.make_stats().num_preemptions > 0
    for request, result in zip(requests, found, strict=False):
        assert result.token_ids == tokens_of(request)
    assert num_free(engine) == 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_aborting_a_pair_frees_both_sides(depth, steps):
    engine = Engine(make_scheduler(max_num_batched_tokens=12), depth=depth)
    request, ordinary = paired(max_tokens=30), make_request(max_tokens=8)
    engine.add(request, ordinary)
    for _ in range(steps):
        engine.step()
    engine.scheduler.abort_requests([request.request_id])
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.results[ordinary.request_id].token_ids == tokens_of(ordinary)
    assert num_free(engine) == 64
    engine.step()
    assert not engine.runner.rows


def test_a_pause_that_drops_computed_tokens_restarts_both_sides():
    engine = Engine(make_scheduler())
    request = paired(max_tokens=8)
    engine.add(request)
    for _ in range(3):
        engine.step()
    engine.scheduler.forget_computed(restart=True)
    engine.scheduler.check_integrity()
    assert num_free(engine) == 64
    engine.run()
    assert engine.results[request.request_id].token_ids == tokens_of(request)


@pytest.mark.parametrize("side", ["", " (companion)"])
def test_a_failing_side_fails_the_request_alone(side):
    engine = Engine(make_scheduler(), depth=2)
    request, ordinary = paired(request_id="bad"), make_request()
    engine.runner.failing.add("bad" + side)
    found = engine.run(request, ordinary)
    assert (found[0].finish_reason, found[0].token_ids) == (FinishReason.ERROR, [])
    assert found[1].token_ids == tokens_of(ordinary)
    assert num_free(engine) == 64
    engine.runner.failing.clear()
    assert engine.run(paired())[0].token_ids == tokens_of(paired()), "no block of the failed request is in the cache"


def test_stop_tokens_and_the_context_end_both_sides():
    engine = Engine(make_scheduler(max_model_len=30))
    ended = paired(max_tokens=None)
    result = engine.run(ended)[0]
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == 30 - len(OTHER), "the longer side reaches max_model_len"
    stopped = paired(max_tokens=9, stop_token_ids=[result.token_ids[3]])
    result = engine.run(stopped)[0]
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == tokens_of(stopped, 30)


def test_limits_that_hold_no_pair_are_errors():
    for settings, message in (
        ({"max_num_seqs": 1}, "needs two rows in a step"),
        ({"max_num_batched_tokens": 1}, "needs two rows in a step"),
        ({"enable_chunked_prefill": False, "max_model_len": 32, "max_num_batched_tokens": 32}, "Without chunked"),
        ({"max_model_len": 21}, "other_prompt has 21 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            make_scheduler(**settings).add_request(paired())
    engine = Engine(make_scheduler(num_blocks=7))
    result = engine.run(paired())[0]
    assert result.finish_reason is FinishReason.ERROR
    assert "30 tokens in the KV cache, 9 blocks of 4" in str(result.outputs[-1].error)


def test_a_worker_that_does_not_know_of_pairs_is_found_out():
    engine = Engine(make_scheduler())
    request = paired()
    engine.add(request)
    plan = engine.scheduler.schedule()
    output = engine.runner.execute(plan)
    output.sampled_token_ids[1] += 1
    engine.scheduler.update_from_output(plan, output)
    outputs = engine.scheduler.pop_outputs()
    assert [(each.finish_reason, each.error_parameter) for each in outputs] == [(FinishReason.ERROR, "scale")]
    assert num_free(engine) == 64
