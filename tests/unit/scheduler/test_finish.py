"""Tests of request termination: finish reasons, final outputs, logprobs and scheduler statistics."""

import pytest

from mvllm.errors import PlatformError
from mvllm.messages.requests import FinishReason
from mvllm.messages.sampling_params import RequestOutputKind
from mvllm.messages.scheduler_output import ModelRunnerOutput
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens, logprobs_of

PROMPT = [1, 2, 3, 4, 5]


def generated_tokens(prompt=PROMPT, max_tokens=20):
    """The tokens that the fake runner generates without stop conditions."""
    request = make_request(prompt, max_tokens=max_tokens)
    return expected_tokens(prompt, request.sampling_params, [], 64)


TOKENS = generated_tokens()
FIFTH = TOKENS[4]
assert FIFTH not in TOKENS[:4]


def run_one(**request):
    [result] = Engine(make_scheduler()).run(make_request(PROMPT, **{"max_tokens": 20, **request}))
    return result, result.outputs[-1]


def test_a_request_ends_after_max_tokens():
    result, last = run_one(max_tokens=3)
    assert result.token_ids == TOKENS[:3]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)


def test_a_request_ends_at_max_model_len():
    [result] = Engine(make_scheduler(max_model_len=12)).run(make_request(PROMPT, max_tokens=None))
    assert result.token_ids == TOKENS[:7]
    assert result.finish_reason is FinishReason.LENGTH


def test_a_request_ends_with_an_end_of_sequence_token():
    result, last = run_one(eos=[FIFTH])
    assert result.token_ids == TOKENS[:5]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)


def test_any_of_several_end_of_sequence_tokens_ends_a_request():
    assert run_one(eos=[TOKENS[9], FIFTH])[0].token_ids == TOKENS[:5]


def test_the_end_of_sequence_token_can_be_ignored():
    result, last = run_one(eos=[FIFTH], ignore_eos=True)
    assert result.token_ids == TOKENS
    assert last.finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_a_request_and_is_the_stop_reason():
    result, last = run_one(stop_token_ids=[FIFTH])
    assert result.token_ids == TOKENS[:5]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, FIFTH)


def test_a_stop_token_that_is_also_the_ignored_end_of_sequence_still_stops():
    _, last = run_one(stop_token_ids=[FIFTH], eos=[FIFTH], ignore_eos=True)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, FIFTH)


def test_an_end_of_sequence_token_is_not_reported_as_a_stop_token():
    _, last = run_one(stop_token_ids=[FIFTH], eos=[FIFTH])
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("kind", [{"eos": [TOKENS[2], TOKENS[7]]}, {"stop_token_ids": [TOKENS[2], TOKENS[7]]}])
def test_nothing_stops_a_request_before_min_tokens(kind):
    assert run_one(**kind)[0].token_ids == TOKENS[:3]
    assert run_one(**kind, min_tokens=3)[0].token_ids == TOKENS[:3]
    assert run_one(**kind, min_tokens=4)[0].token_ids == TOKENS[:8]


def test_a_stop_token_at_max_tokens_finishes_with_reason_stop():
    assert run_one(max_tokens=5, eos=[FIFTH])[1].finish_reason is FinishReason.STOP


def test_tokens_come_one_by_one():
    result, _ = run_one(max_tokens=4)
    assert [output.new_token_ids for output in result.outputs] == [[token] for token in TOKENS[:4]]
    assert [output.finish_reason for output in result.outputs] == [None, None, None, FinishReason.LENGTH]


def test_final_only_sends_all_tokens_in_one_output():
    result, _ = run_one(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY, logprobs=1)
    assert [output.new_token_ids for output in result.outputs] == [TOKENS[:4]]
    assert result.logprobs == [logprobs_of(token) for token in TOKENS[:4]]


def test_final_only_with_stop_strings_sends_each_token_to_the_front_end():
    result, _ = run_one(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY, stop=["x"])
    assert len(result.outputs) == 4


def test_logprobs_come_with_their_tokens():
    result, _ = run_one(max_tokens=4, logprobs=0)
    assert [output.logprobs for output in result.outputs] == [[logprobs_of(token)] for token in TOKENS[:4]]


def test_unrequested_logprobs_are_not_sent():
    _, last = run_one(max_tokens=2)
    assert last.logprobs is None and last.prompt_logprobs is None


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_prompt_logprobs_are_gathered_over_chunks_and_sent_once(budget, kind):
    engine = Engine(make_scheduler(max_num_batched_tokens=budget))
    [result] = engine.run(make_request(PROMPT, prompt_logprobs=1, output_kind=kind))
    assert result.prompt_logprobs == [logprobs_of(token) for token in PROMPT[1:]]
    assert result.outputs[0].prompt_logprobs is not None
    assert result.token_ids == TOKENS[:4]


def test_prompt_logprobs_of_a_one_token_prompt_are_an_empty_list():
    [result] = Engine(make_scheduler()).run(make_request([3], prompt_logprobs=1))
    assert result.prompt_logprobs == []


def test_a_failed_row_ends_its_request_and_no_other():
    engine = Engine(make_scheduler())
    engine.runner.failing = {"bad"}
    good, bad = make_request(PROMPT), make_request(7, request_id="bad")
    good_result, bad_result = engine.run(good, bad)
    assert good_result.token_ids == TOKENS[:4]
    assert (bad_result.finish_reason, bad_result.outputs[-1].error) == (FinishReason.ERROR, "not a number")
    assert bad_result.token_ids == []


def test_a_request_that_fails_during_decode_keeps_its_generated_tokens():
    for kind in RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY:
        engine = Engine(make_scheduler())
        engine.add(make_request(PROMPT, request_id="bad", output_kind=kind))
        engine.step()
        engine.step()
        engine.runner.failing = {"bad"}
        engine.run()
        assert engine.results["bad"].token_ids == TOKENS[:2]
        assert engine.results["bad"].finish_reason is FinishReason.ERROR


def test_blocks_of_a_failed_request_are_not_prefix_cache_hits():
    engine = Engine(make_scheduler(block_size=4))
    engine.runner.failing = {"bad"}
    [bad] = engine.run(make_request(list(range(20)), request_id="bad"))
    [good] = engine.run(make_request(list(range(20))))
    assert bad.finish_reason is FinishReason.ERROR
    assert (good.finish_reason, good.num_cached_tokens) == (FinishReason.LENGTH, 0)


def test_a_request_too_large_for_the_cache_fails_immediately():
    engine = Engine(make_scheduler(num_blocks=3, block_size=4))
    large, small = engine.run(make_request(13), make_request(2))
    assert large.finish_reason is FinishReason.ERROR
    assert "needs room for 13 tokens in the KV cache, 4 blocks of 4; the cache has 3" in large.outputs[-1].error
    assert small.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lone_request_that_outgrows_the_cache_fails_and_keeps_its_tokens(depth):
    engine = Engine(make_scheduler(num_blocks=3, block_size=4), depth=depth)
    [result] = engine.run(make_request(PROMPT, max_tokens=20))
    assert result.finish_reason is FinishReason.ERROR
    assert result.token_ids == TOKENS[:8]  # positions 0..11 have a slot; the token after them was still sampled
    assert engine.scheduler.make_stats().kv_cache_usage == 0.0


def test_has_requests_is_true_until_the_error_output_is_returned():
    engine = Engine(make_scheduler(num_blocks=1, block_size=4))
    engine.add(make_request(9))
    plan = engine.scheduler.schedule()
    assert plan.rows == [] and engine.scheduler.has_requests()
    outputs = engine.scheduler.update_from_output(plan, engine.runner.execute(plan))
    assert [output.finish_reason for output in outputs.outputs] == [FinishReason.ERROR]
    assert not engine.scheduler.has_requests()


def test_times_and_cached_tokens_are_those_of_the_first_schedule():
    now = iter(range(1000))
    engine = Engine(make_scheduler(block_size=4, clock=lambda: float(next(now))))
    engine.run(make_request([*PROMPT, 6, 7, 8, 9]))
    [result] = engine.run(make_request([*PROMPT, 6, 7, 8, 9]))
    assert {output.num_cached_tokens for output in result.outputs} == {8}
    assert len({output.scheduled_time for output in result.outputs}) == 1


def test_a_result_of_another_step_is_refused():
    engine = Engine(make_scheduler())
    engine.add(make_request())
    plan = engine.scheduler.schedule()
    with pytest.raises(PlatformError, match="step 0 with 1 rows and answered step 5"):
        engine.scheduler.update_from_output(plan, ModelRunnerOutput(step=5, sampled_token_ids=[1]))


def test_a_result_with_a_missing_token_is_refused():
    engine = Engine(make_scheduler())
    engine.add(make_request())
    plan = engine.scheduler.schedule()
    with pytest.raises(PlatformError, match="answered step 0 with 0 tokens"):
        engine.scheduler.update_from_output(plan, ModelRunnerOutput(step=0))


def test_statistics_count_requests_and_blocks():
    engine = Engine(make_scheduler(num_blocks=8, block_size=4, max_num_seqs=1))
    engine.add(make_request(PROMPT, max_tokens=4), make_request(PROMPT, max_tokens=4))
    plan = engine.scheduler.schedule()
    stats = engine.scheduler.update_from_output(plan, engine.runner.execute(plan)).stats
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (1, 1, 0.25)
    assert stats.num_waiting_tokens == len(PROMPT)
    engine.run()
    stats = engine.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.num_prompt_tokens == 2 * len(PROMPT)
    assert (stats.num_generated_tokens, stats.num_waiting_tokens) == (2 * 4, 0)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10, 4)
