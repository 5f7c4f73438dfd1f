"""Requests that share prefixes."""

import pytest

from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens

PROMPT = list(range(100, 118))  # 4 full blocks of 4 and 2 tokens


def test_a_second_request_computes_only_the_uncached_suffix():
    engine = Engine(make_scheduler())
    engine.run(make_request(PROMPT))
    request = make_request(PROMPT, request_id="second")
    [result] = engine.run(request)
    assert result.num_cached_tokens == 16
    assert engine.runner.num_computed["second"] == 2 + 3
    assert result.token_ids == expected_tokens(PROMPT, request.sampling_params, [], 64)


def test_a_fully_cached_prompt_recomputes_its_last_block_for_logits():
    engine = Engine(make_scheduler())
    engine.run(make_request(PROMPT[:16]))
    [result] = engine.run(make_request(PROMPT[:16], request_id="second", max_tokens=1))
    assert result.num_cached_tokens == 12
    assert engine.runner.num_computed["second"] == 4


def test_the_next_turn_of_a_conversation_reuses_blocks_of_generated_tokens():
    engine = Engine(make_scheduler())
    [first] = engine.run(make_request(PROMPT, max_tokens=11))
    conversation = PROMPT + first.token_ids
    [second] = engine.run(make_request([*conversation, 7, 8, 9]))
    assert second.num_cached_tokens == (len(conversation) - 1) // 4 * 4


@pytest.mark.parametrize("depth", [2, 3])
def test_blocks_whose_tokens_were_in_flight_when_planned_are_cached(depth):
    engine = Engine(make_scheduler(), depth=depth)
    [first] = engine.run(make_request(PROMPT, max_tokens=11))
    conversation = PROMPT + first.token_ids
    [second] = engine.run(make_request([*conversation, 7, 8, 9]))
    assert second.num_cached_tokens == (len(conversation) - 1) // 4 * 4


def test_requests_planned_in_the_same_step_share_blocks():
    engine = Engine(make_scheduler())
    engine.add(*[make_request(PROMPT) for _ in range(3)])
    assert engine.step().num_scheduled_tokens == [18, 2, 2]
    engine.run()


def test_requests_of_other_salts_do_not_share():
    engine = Engine(make_scheduler())
    results = engine.run(*[make_request(PROMPT, cache_salt=salt) for salt in (None, "", "a", "a")])
    assert [result.num_cached_tokens for result in results] == [0, 0, 0, 16]


def test_without_caching_nothing_is_shared_and_nothing_counted():
    engine = Engine(make_scheduler(enable_caching=False))
    engine.run(make_request(PROMPT))
    [result] = engine.run(make_request(PROMPT))
    assert result.num_cached_tokens == 0
    assert engine.scheduler.make_stats().prefix_cache_queries == 0


@pytest.mark.parametrize("enable_caching", [True, False])
def test_siblings_compute_their_prompt_once(enable_caching):
    engine = Engine(make_scheduler(enable_caching=enable_caching))
    engine.add(*[make_request(PROMPT, sibling_group="g") for _ in range(4)])
    assert engine.step().num_scheduled_tokens == [18, 2, 2, 2]
    used = engine.scheduler.make_stats().kv_cache_usage * 64
    assert used == 4 + 4  # the shared blocks, and one each
    engine.run()


def test_a_sibling_that_comes_late_still_finds_the_prompt():
    engine = Engine(make_scheduler(enable_caching=False, max_num_seqs=1))
    results = engine.run(*[make_request(PROMPT, sibling_group="g") for _ in range(3)])
    assert [result.num_cached_tokens for result in results] == [0, 16, 16]


def test_siblings_write_their_own_tokens_into_their_own_blocks():
    engine = Engine(make_scheduler(enable_caching=False))
    requests = [make_request(PROMPT, sibling_group="g", max_tokens=n) for n in (3, 9, 20)]
    for request, result in zip(requests, engine.run(*requests)):
        assert result.token_ids == expected_tokens(PROMPT, request.sampling_params, [], 64)


def test_a_request_for_prompt_logprobs_does_not_read_the_cache_but_fills_it():
    engine = Engine(make_scheduler())
    engine.run(make_request(PROMPT))
    [asking] = engine.run(make_request(PROMPT, prompt_logprobs=1))
    assert asking.num_cached_tokens == 0
    assert len(asking.prompt_logprobs) == len(PROMPT) - 1
    assert engine.scheduler.make_stats().prefix_cache_queries == len(
        PROMPT
    )  # only the first request had prompt_logprobs

    engine = Engine(make_scheduler())
    engine.run(make_request(PROMPT, prompt_logprobs=1))
    [result] = engine.run(make_request(PROMPT))
    assert result.num_cached_tokens == 16


def test_a_chunked_prefix_is_cached_as_far_as_it_is_planned():
    engine = Engine(make_scheduler(max_num_batched_tokens=10))
    engine.add(make_request(PROMPT))
    engine.step()  # 10 of 18 tokens: 2 full blocks
    engine.add(make_request(PROMPT))
    plan = engine.step()
    assert plan.num_scheduled_tokens == [8, 2]
    assert plan.new_requests[0].num_computed_tokens == 16  # the other blocks are filled in this step
    engine.run()


def test_hits_are_counted_in_tokens():
    engine = Engine(make_scheduler())
    engine.run(make_request(PROMPT))
    engine.run(make_request(PROMPT))
    stats = engine.scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (36, 16)


def test_the_cache_is_reset_only_between_requests():
    engine = Engine(make_scheduler())
    engine.add(make_request(PROMPT))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    [result] = engine.run(make_request(PROMPT))
    assert result.num_cached_tokens == 0


def test_old_prefixes_are_evicted_oldest_first():
    engine = Engine(make_scheduler(num_blocks=12, block_size=4))
    for start in (100, 200):
        engine.run(make_request(list(range(start, start + 17)), max_tokens=1))  # 4 blocks stay of each
    engine.run(make_request(list(range(100, 117)), max_tokens=1))  # used again: 200 is now the least recently used
    engine.run(make_request(list(range(300, 317)), max_tokens=8))
    [first] = engine.run(make_request(list(range(100, 117)), max_tokens=1))
    [second] = engine.run(make_request(list(range(200, 217)), max_tokens=1))
    assert first.num_cached_tokens == 16
    assert second.num_cached_tokens < 16
