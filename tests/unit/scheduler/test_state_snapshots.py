"""State slots in plans: where states are kept, who starts from them, and what happens without free slots."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mvllm.messages.requests import FinishReason
from mvllm.messages.scheduler_output import SchedulerOutput
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens
from tests.unit.scheduler.test_speculative import following


def make_engine(*, depth: int = 1, propose=None, num_state_slots: int = 20, **settings) -> Engine:
    """Blocks of 4 tokens; by default a snapshot every 8 tokens."""
    scheduler = make_scheduler(num_state_slots=num_state_slots, **settings)
    engine = Engine(scheduler, depth=depth)
    engine.runner.propose = propose
    return engine


def steps_of(engine: Engine, *requests) -> list[SchedulerOutput]:
    engine.add(*requests)
    plans = []
    while engine.scheduler.has_requests():
        plans.append(engine.step())
    while engine.in_flight:
        engine.collect()
    engine.check_snapshots()
    return plans


def check_tokens(engine: Engine, *requests) -> None:
    for request in requests:
        expected = expected_tokens(
            request.prompt_token_ids, request.sampling_params, [], engine.scheduler._max_model_len
        )
        assert engine.results[request.request_id].token_ids == expected


def num_cached(engine: Engine, *requests) -> list[int]:
    return [engine.results[request.request_id].num_cached_tokens for request in requests]


# --------------------------------------------------------------------------------------------- where states are kept


def test_a_request_writes_its_own_slot_and_starts_from_zeros():
    engine = make_engine(enable_caching=False)
    plans = steps_of(engine, make_request(6, max_tokens=3), make_request(9, max_tokens=3))
    assert [plan.read_slots for plan in plans] == [[-1, -1], [0, 1], [0, 1]]
    assert [plan.write_slots for plan in plans] == [[0, 1]] * 3


def test_a_model_without_states_has_no_slots_in_its_plans():
    engine = Engine(make_scheduler())
    for plan in steps_without_states(engine, make_request(30), make_request(9)):
        assert plan.read_slots == plan.write_slots == []


def steps_without_states(engine: Engine, *requests) -> list[SchedulerOutput]:
    engine.add(*requests)
    plans = []
    while engine.scheduler.has_requests():
        plans.append(engine.step())
    return plans


def test_the_steps_of_a_prompt_end_at_the_interval_and_at_its_last_block():
    engine = make_engine(least_snapshot_distance=4)
    plans = steps_of(engine, make_request(31, max_tokens=1))
    assert [plan.num_scheduled_tokens for plan in plans] == [[8], [8], [8], [4], [3]]
    # Each step after a snapshot reads it, and writes another slot.
    assert [plan.read_slots for plan in plans] == [[-1], *[plan.write_slots for plan in plans[:-1]]]
    assert len({plan.write_slots[0] for plan in plans}) == 5


def test_the_last_block_is_left_out_if_the_snapshot_before_it_is_near():
    engine = make_engine(least_snapshot_distance=5)
    plans = steps_of(engine, make_request(31, max_tokens=1))
    assert [plan.num_scheduled_tokens for plan in plans] == [[8], [8], [8], [7]]


def test_siblings_keep_the_last_block_however_near_the_snapshot_before_it_is():
    engine = make_engine(least_snapshot_distance=64)
    prompt = list(range(31))
    siblings = [make_request(prompt, max_tokens=2, sibling_group="g") for _ in range(3)]
    plans = steps_of(engine, *siblings)
    assert [plan.num_scheduled_tokens for plan in plans] == [[8], [8], [8], [4], [3, 3, 3], [1, 1, 1]]
    assert num_cached(engine, *siblings) == [0, 28, 28]


def test_without_prefix_caching_only_siblings_share_and_only_the_end_of_the_prompt():
    engine = make_engine(enable_caching=False)
    prompt = list(range(31))
    siblings = [make_request(prompt, max_tokens=2, sibling_group="g") for _ in range(3)]
    plans = steps_of(engine, *siblings)
    assert [plan.num_scheduled_tokens for plan in plans] == [[28], [3, 3, 3], [1, 1, 1]]
    assert num_cached(engine, *siblings) == [0, 28, 28]
    [plan] = steps_of(engine, alone := make_request(prompt, max_tokens=1))
    assert plan.num_scheduled_tokens == [31]
    check_tokens(engine, *siblings, alone)


def test_the_state_of_generated_tokens_is_kept_at_the_interval():
    engine = make_engine()
    first = make_request([1, 2, 3], max_tokens=16)
    steps_of(engine, first)
    next_turn = make_request([1, 2, 3, *engine.results[first.request_id].token_ids, 5], max_tokens=2)
    steps_of(engine, next_turn)
    assert num_cached(engine, next_turn) == [16]
    check_tokens(engine, first, next_turn)


@pytest.mark.parametrize("depth", [2, 3])
def test_with_tokens_in_flight_a_snapshot_is_found_once_they_are_known(depth):
    engine = make_engine(depth=depth)
    first = make_request([1, 2, 3], max_tokens=16)
    steps_of(engine, first)
    next_turn = make_request([1, 2, 3, *engine.results[first.request_id].token_ids, 5], max_tokens=2)
    steps_of(engine, next_turn)
    assert num_cached(engine, next_turn) == [16]
    check_tokens(engine, first, next_turn)


def test_with_interval_0_the_state_is_kept_at_the_end_of_a_prompt_and_where_prompts_part():
    engine = make_engine(state_snapshot_interval=0, least_snapshot_distance=4)
    start = list(range(18))
    first, second, third = (make_request([*start, *[100 + i] * 8], max_tokens=1) for i in range(3))
    assert [plan.num_scheduled_tokens for plan in steps_of(engine, first)] == [[24], [2]]
    # Its blocks are cached as far as 16 tokens, but there is no state.
    assert [plan.num_scheduled_tokens for plan in steps_of(engine, second)] == [[16], [8], [2]]
    assert [plan.num_scheduled_tokens for plan in steps_of(engine, third)] == [[8], [2]]
    assert num_cached(engine, first, second, third) == [0, 0, 16]
    check_tokens(engine, first, second, third)


def test_an_interval_is_rounded_up_to_blocks():
    engine = make_engine(state_snapshot_interval=5, least_snapshot_distance=64)
    assert [plan.num_scheduled_tokens for plan in steps_of(engine, make_request(19, max_tokens=1))] == [[8], [8], [3]]


def test_without_chunked_prefill_no_step_is_cut_and_no_request_waits():
    engine = make_engine(enable_chunked_prefill=False)
    prompt = list(range(20))
    requests = [make_request(prompt, max_tokens=6) for _ in range(2)]
    plans = steps_of(engine, *requests)
    assert plans[0].num_scheduled_tokens == [20, 20]
    check_tokens(engine, *requests)


def test_a_request_that_needs_every_position_starts_from_zeros_and_leaves_snapshots():
    engine = make_engine()
    prompt = list(range(20))
    asks, other = make_request(prompt, prompt_logprobs=1, max_tokens=1), make_request(prompt, max_tokens=1)
    steps_of(engine, other)
    steps_of(engine, asks)
    assert num_cached(engine, other, asks) == [0, 0]
    check_tokens(engine, other, asks)


# ---------------------------------------------------------------------------------------------------- waiting


def test_prompts_that_begin_alike_and_arrive_together_compute_the_common_tokens_once():
    for num_shared in (1024, 1000, 1023):
        engine = make_engine(
            num_blocks=4000,
            block_size=16,
            num_state_slots=60,
            state_snapshot_interval=512,
            least_snapshot_distance=64,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            max_num_seqs=32,
        )
        shared = list(range(num_shared))
        requests = [make_request([*shared, *range(5000 + 100 * i, 5030 + 100 * i)], max_tokens=2) for i in range(16)]
        steps_of(engine, *requests)
        assert sum(num_cached(engine, *requests)) >= 0.9 * 16 * num_shared
        check_tokens(engine, *requests)


def test_others_run_while_a_request_waits_for_a_snapshot():
    engine = make_engine(max_num_batched_tokens=16)
    prompt = list(range(24))
    first, waits, other = make_request(prompt), make_request(prompt), make_request(3)
    engine.add(first, waits, other)
    assert engine.step().num_scheduled_tokens == [8, 3]
    assert engine.step().num_scheduled_tokens == [1, 8]  # now the first one is at 16 tokens
    assert engine.step().num_scheduled_tokens == [1, 4]  # at 20, the last full block
    assert engine.step().num_scheduled_tokens == [1, 4, 4]
    engine.run()
    assert num_cached(engine, first, waits, other) == [0, 20, 0]
    check_tokens(engine, first, waits, other)


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_request_stops_waiting_if_the_other_one_ends(end):
    engine = make_engine()
    prompt = list(range(24))
    first, second, third = make_request(prompt), make_request(prompt), make_request(prompt)
    engine.add(first, second, third)
    assert engine.step().num_scheduled_tokens == [8]
    if end == "abort":
        engine.scheduler.abort_requests([first.request_id])
    else:
        engine.scheduler.requests.preempt_last()
    # One of them starts from the snapshot that is left. The others wait for it.
    plan = engine.step()
    assert (plan.num_scheduled_tokens, plan.new_requests[0].num_computed_tokens) == ([8], 8)
    assert engine.scheduler.num_waiting == (1 if end == "abort" else 2)
    engine.run()
    check_tokens(engine, *[request for request in (first, second, third) if end != "abort" or request is not first])
    assert num_cached(engine, third) == [20]


def test_a_request_waits_only_for_one_before_it_in_the_service_order():
    engine = make_engine(policy="priority")
    prompt = list(range(24))
    engine.add(make_request(prompt, priority=1))
    engine.step()
    engine.add(urgent := make_request(prompt, priority=0))
    plan = engine.step()
    assert [data.request_id for data in plan.new_requests] == [urgent.request_id]
    engine.run()
    check_tokens(engine, urgent)


def test_a_request_waits_for_one_that_needs_every_position():
    engine = make_engine()
    prompt = list(range(24))
    engine.add(asks := make_request(prompt, prompt_logprobs=1), waits := make_request(prompt))
    assert engine.step().num_scheduled_tokens == [8]
    engine.run()
    assert num_cached(engine, asks, waits) == [0, 20]
    check_tokens(engine, asks, waits)


def test_a_request_does_not_wait_for_a_few_tokens():
    engine = make_engine(
        num_blocks=300, max_num_batched_tokens=200, state_snapshot_interval=64, least_snapshot_distance=16
    )
    requests = [make_request([*range(14), *[100 + i] * 30], max_tokens=1) for i in range(4)]
    engine.add(*requests)
    # They have 12 tokens in common. One request ends its step there, for later ones.
    assert engine.step().num_scheduled_tokens == [40, 12, 40, 40]
    engine.run()
    steps_of(engine, later := make_request([*range(14), 99], max_tokens=1))
    assert num_cached(engine, *requests, later) == [0, 0, 0, 0, 12]
    check_tokens(engine, *requests, later)


def test_a_request_does_not_wait_long_for_one_that_stands_still():
    limits = {"long_prefill_token_threshold": 20}
    engine = make_engine(num_blocks=200, max_model_len=300, **limits)
    prompt = list(range(60))
    engine.add(make_request(200), held_back := make_request(prompt), make_request(2, max_tokens=100))
    engine.step()
    # From now on a request generates, and the second long prompt stands still until the first one is computed.
    engine.add(short := make_request([*prompt[:16], 99]))
    num_steps = 1
    while not (plan := engine.step()).new_requests:
        num_steps += 1
    assert num_steps == 6 and plan.new_requests[0].num_computed_tokens == 8
    assert engine.scheduler.requests.by_id[held_back.request_id].num_computed_tokens == 8
    engine.run()
    check_tokens(engine, held_back, short)


def test_a_request_does_not_wait_if_it_would_not_find_more():
    engine = make_engine()
    prompt = list(range(16))
    steps_of(engine, make_request([*prompt, 90], max_tokens=1))
    long, short = make_request([*prompt, *range(50, 90)], max_tokens=1), make_request([*prompt, 91], max_tokens=1)
    engine.add(long, short)
    assert engine.step().num_scheduled_tokens == [1, 8]
    engine.run()
    assert num_cached(engine, long, short) == [16, 16]


# ------------------------------------------------------------------------------------------------- without free slots


def test_no_more_requests_run_than_there_are_slots():
    engine = make_engine(num_state_slots=3)
    requests = [make_request(5, max_tokens=4) for _ in range(5)]
    engine.add(*requests)
    assert len(engine.step().rows) == 3
    engine.run()
    check_tokens(engine, *requests)


def test_without_a_free_slot_no_snapshot_is_kept_and_the_request_goes_on():
    engine = make_engine(num_state_slots=1)
    plans = steps_of(engine, request := make_request(31, max_tokens=10))
    assert {slot for plan in plans for slot in plan.write_slots} == {0}
    assert engine.check_snapshots() == 0
    check_tokens(engine, request)


def test_the_last_free_slot_may_be_the_snapshot_that_a_request_starts_from():
    engine = make_engine(num_state_slots=2)
    prompt = list(range(8))
    steps_of(engine, first := make_request([*prompt, 9], max_tokens=1))
    snapshots = engine.check_snapshots()
    blocker = make_request(2, max_tokens=20)
    engine.add(blocker)
    engine.step()  # in the slot that has no snapshot
    second = make_request([*prompt, 10], max_tokens=2)
    engine.add(second)
    plan = engine.step()
    assert snapshots == 1 and plan.read_slots[1] == plan.write_slots[1]
    engine.run()
    assert num_cached(engine, second) == [8]
    check_tokens(engine, first, second, blocker)


def test_the_snapshot_unused_for_the_longest_time_is_evicted():
    engine = make_engine(num_state_slots=3, state_snapshot_interval=8, least_snapshot_distance=64)
    prompts = [[i * 50 + j for j in range(9)] for i in range(3)]
    for prompt in prompts:
        steps_of(engine, make_request(prompt, max_tokens=1))
    again = [make_request(prompt, max_tokens=1) for prompt in reversed(prompts)]
    for request in again:
        steps_of(engine, request)
    assert num_cached(engine, *again) == [8, 8, 0]


# ----------------------------------------------------------------------------------------------------- draft tokens


def states_of(plan):
    return plan.read_slots, plan.write_slots, plan.draft_slots


def test_a_step_continues_behind_the_last_accepted_draft_token():
    """All three, the first one, or none of the draft tokens."""
    engine = make_engine(
        propose=lambda tokens: following(tokens, 3), num_speculative_tokens=3, state_snapshot_interval=64
    )
    plans = steps_of(engine, request := make_request(3, max_tokens=9))
    assert [plan.num_scheduled_tokens for plan in plans] == [[3], [4], [4]]
    first, second, third = map(states_of, plans)
    assert first == ([-1], [0], {})
    assert second[:2] == ([0], [0]) and third[:2] == ([second[2][0][2]],) * 2
    check_tokens(engine, request)

    engine = make_engine(
        propose=lambda tokens: [*following(tokens, 1), 99], num_speculative_tokens=2, state_snapshot_interval=64
    )
    plans = steps_of(engine, request := make_request(3, max_tokens=8))
    assert [plan.num_scheduled_tokens for plan in plans] == [[3], [3], [3], [3], [1]]
    for before, after in pairwise(plans[1:]):
        assert after.read_slots == after.write_slots == [before.draft_slots[0][0]]
    check_tokens(engine, request)
    assert engine.scheduler.make_stats().kv_cache_usage == 0

    engine = make_engine(propose=lambda tokens: [99], num_speculative_tokens=1, state_snapshot_interval=64)
    plans = steps_of(engine, request := make_request(3, max_tokens=4))
    assert [plan.num_scheduled_tokens for plan in plans] == [[3], [2], [2], [1]]
    assert all(plan.read_slots == plan.write_slots == [0] for plan in plans[1:])
    check_tokens(engine, request)


def test_draft_tokens_end_at_a_snapshot_and_need_a_slot_each():
    engine = make_engine(propose=lambda tokens: following(tokens, 5), num_speculative_tokens=5)
    plans = steps_of(engine, request := make_request([1, 2, 3], max_tokens=14))
    assert [plan.num_scheduled_tokens for plan in plans] == [[3], [5], [6], [2]]  # 8, and 14 of 16
    check_tokens(engine, request)
    for num_slots in (1, 2, 3):
        engine = make_engine(
            propose=lambda tokens: following(tokens, 5), num_speculative_tokens=5, num_state_slots=num_slots
        )
        plans = steps_of(engine, request := make_request([1, 2, 3], max_tokens=14))
        assert max(len(plan.draft_token_ids.get(0, ())) for plan in plans) == num_slots - 1
        check_tokens(engine, request)


def test_draft_tokens_leave_slots_for_waiting_requests():
    engine = make_engine(
        propose=lambda tokens: following(tokens, 3),
        num_speculative_tokens=3,
        num_state_slots=4,
        state_snapshot_interval=64,
    )
    requests = [make_request(3, max_tokens=20) for _ in range(5)]
    engine.add(*requests[:2])
    engine.step()
    engine.add(*requests[2:])
    plan = engine.step()
    assert len(plan.rows) == 4 and not plan.draft_token_ids
    engine.run()
    check_tokens(engine, *requests)


# --------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_that_read_a_snapshot_of_a_failed_one_starts_again(depth):
    engine = make_engine(depth=depth)
    prompt = list(range(24))
    first, second = make_request(prompt, request_id="bad"), make_request(prompt)
    engine.add(first, second)
    for _ in range(4):
        engine.step()
    engine.runner.failing.add("bad")
    engine.run()
    while engine.in_flight:
        engine.collect()
    assert engine.results["bad"].finish_reason is FinishReason.ERROR
    check_tokens(engine, second)
    engine.check_snapshots()


@pytest.mark.parametrize("depth", [2, 3])
def test_so_does_one_that_read_blocks_of_another_request_and_only_the_state_of_the_failed_one(depth):
    engine = make_engine(depth=depth, state_snapshot_interval=0, least_snapshot_distance=64)
    start = list(range(18))
    steps_of(engine, make_request([*start, 50], max_tokens=1))  # leaves blocks, and no state
    bad = make_request([*start, 60], request_id="bad", sibling_group="g")
    reader = make_request([*start, 70], sibling_group="g")
    engine.runner.failing.add("bad")
    engine.add(bad, reader)
    assert engine.step().num_scheduled_tokens == [16]
    assert engine.step().num_scheduled_tokens == [3, 3]  # the results of the first step are not back
    engine.run()
    while engine.in_flight:
        engine.collect()
    assert engine.results["bad"].finish_reason is FinishReason.ERROR
    check_tokens(engine, reader)
    engine.check_snapshots()


def test_no_snapshot_of_a_failed_request_is_found():
    engine = make_engine()
    prompt = list(range(24))
    engine.runner.failing.add("bad")
    engine.run(make_request(prompt, request_id="bad"))
    assert engine.check_snapshots() == 0
    engine.run(again := make_request(prompt))
    assert num_cached(engine, again) == [0]
    check_tokens(engine, again)


def test_the_cache_is_reset_with_its_snapshots():
    engine = make_engine()
    steps_of(engine, make_request(31, max_tokens=1))
    assert engine.check_snapshots() == 4
    assert engine.scheduler.reset_prefix_cache()
    assert engine.check_snapshots() == 0


@pytest.mark.parametrize("restart", [True, False])
def test_after_new_weights_no_snapshot_is_found_and_running_requests_leave_none(restart):
    engine = make_engine()
    prompt = list(range(20))
    engine.add(running := make_request(prompt, max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.scheduler.forget_computed(restart=restart)
    assert engine.check_snapshots() == 0
    engine.add(later := make_request(prompt, max_tokens=2))
    engine.run()
    assert num_cached(engine, later) == ([16] if restart else [0])
    check_tokens(engine, running, later)


def test_slots_in_use_count_as_usage():
    engine = make_engine(num_state_slots=4, num_blocks=1000)
    engine.add(make_request(3), make_request(3))
    engine.step()
    assert engine.scheduler.make_stats().kv_cache_usage == 0.5
