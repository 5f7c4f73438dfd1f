"""The scheduler with a host tier and a connector: what is saved when, what is loaded, and who waits."""

from __future__ import annotations

import pytest

from mvllm.kv_cache.host_tier import HostTier
from mvllm.kv_transfer.connectors import KVConnectors
from mvllm.messages.requests import FinishReason
from mvllm.scheduler.request import RequestStatus
from mvllm.scheduler.swapping import CopyCosts
from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_connector import FakeConnector
from tests.unit.scheduler.fake_runner import expected_tokens
from tests.unit.scheduler.test_random_kv_tiers import check_contents

PROMPT = [7, 3, 9] * 7  # 21 tokens: 5 blocks of 4


def make_engine(
    *, host_blocks: int = 64, store: dict | None = None, role: str = "both", depth: int = 1, tier=None, **settings
) -> Engine:
    connector = FakeConnector(store)
    scheduler = make_scheduler(
        host_tier=HostTier(host_blocks, **(tier or {})),
        connectors=KVConnectors({"fake": (connector, role)}),
        **settings,
    )
    engine = Engine(scheduler, depth=depth)
    connector.engine = engine
    engine.connector = connector
    return engine


def run(engine: Engine, *requests) -> None:
    """Runs requests, then empty steps until everything is saved."""
    for request, result in zip(requests, engine.run(*requests), strict=True):
        params = request.sampling_params
        assert result.token_ids == expected_tokens(request.prompt_token_ids, params, request.eos_token_ids, 64)
    save_all(engine)


def save_all(engine: Engine) -> None:
    while engine.in_flight:
        engine.collect()
    while engine.scheduler.kv_loads.has_unsaved:
        engine.step()
        while engine.in_flight:
            engine.collect()
    engine.scheduler.kv_loads.start_plan()
    check_contents(engine)


def tier_stats(engine: Engine):
    engine.scheduler.kv_loads._stats_time = float("-inf")  # the clock stands still
    return engine.scheduler.make_stats().kv_tiers


def evict_device(engine: Engine) -> None:
    """Fills the device's blocks with other contents."""
    kv_cache = engine.scheduler._kv_cache
    kv_cache._pool.free(kv_cache._pool.allocate(kv_cache.num_free_blocks))


@pytest.mark.parametrize("depth", [1, 2])
def test_confirmed_blocks_are_saved_a_few_per_step(depth):
    engine = make_engine(depth=depth, tier={"max_saved_blocks": 2})
    engine.add(make_request(PROMPT, max_tokens=2))
    saved = [len(engine.step().saved_blocks) for _ in range(5 + depth)]
    assert saved[:depth] == [0] * depth  # the results of the first step are not back
    assert saved[depth:] == [2, 2, 1, *[0] * (len(saved) - depth - 3)]
    save_all(engine)
    assert len(engine.connector.saved) == 5


def test_a_block_that_is_evicted_before_it_was_saved_is_saved_by_that_plan():
    engine = make_engine(num_blocks=10, tier={"max_saved_blocks": 1})
    engine.run(make_request(PROMPT, max_tokens=1))
    plan = None
    engine.add(make_request([1, 2] * 17, max_tokens=1))
    while plan is None or not plan.new_requests:
        plan = engine.step()
    assert len(plan.saved_blocks) > 1
    assert set(plan.saved_blocks) & set(plan.new_requests[0].block_ids)
    save_all(engine)
    run(engine, request := make_request(PROMPT, max_tokens=3))
    assert engine.results[request.request_id].num_cached_tokens == 20


def test_a_prefix_that_has_left_the_device_is_loaded_from_host_memory():
    engine = make_engine(role="producer")
    run(engine, make_request(PROMPT))
    evict_device(engine)
    run(engine, request := make_request(PROMPT, max_tokens=6))
    assert engine.results[request.request_id].num_cached_tokens == 20
    assert tier_stats(engine)["host"].num_loaded == 5 and not engine.connector.loaded


def test_a_prefix_of_another_engine_is_loaded_from_the_connector():
    first = make_engine()
    run(first, make_request(PROMPT))
    other = make_engine(store=first.connector.store)
    other.add(request := make_request(PROMPT, max_tokens=6))
    plan = other.step()
    [state] = other.scheduler.requests.by_id.values()
    assert state.status is RequestStatus.WAITING_FOR_KV and not plan.rows
    assert other.scheduler.is_waiting_for_kv and other.scheduler.make_stats().num_waiting_for_kv == 1
    plan = other.step()
    assert len(plan.loaded_blocks) == 5 and plan.num_scheduled_tokens == [1]
    run(other)
    assert other.results[request.request_id].num_cached_tokens == 20
    other.run()
    assert tier_stats(other)["fake"].num_loaded == 5


def test_requests_that_need_the_same_blocks_load_them_once():
    first = make_engine()
    run(first, make_request(PROMPT))
    other = make_engine(store=first.connector.store)
    run(other, *(make_request(PROMPT, max_tokens=4 + i) for i in range(3)))
    assert len(other.connector.loaded) == 5


def test_a_load_that_fails_is_computed_without_an_error():
    first = make_engine()
    run(first, make_request(PROMPT))
    other = make_engine(store=first.connector.store)
    other.add(request := make_request(PROMPT))
    other.step()
    del other.connector.store[list(other.connector.store)[2]]  # while it is loaded
    run(other)
    assert other.results[request.request_id].finish_reason is FinishReason.LENGTH
    assert other.results[request.request_id].num_cached_tokens == 8
    assert tier_stats(other)["fake"].num_load_failures == 1


def test_an_abort_during_a_load_releases_the_host_blocks_when_the_load_has_ended():
    first = make_engine()
    run(first, make_request(PROMPT))
    other = make_engine(store=first.connector.store)
    other.connector.is_stuck = True
    other.add(request := make_request(PROMPT))
    other.step()
    host = other.scheduler._kv_cache.tier.blocks.host
    other.scheduler.abort_requests([request.request_id])
    other.scheduler.check_integrity()
    assert host.num_available == 64 - 5
    other.connector.is_stuck = False
    other.step()
    assert host.num_available == 64 and not other.scheduler.requests.by_id


@pytest.mark.parametrize("hang", ["is_stuck", "has_answer"])
def test_a_request_does_not_wait_for_ever(hang):
    first, now = make_engine(), [0.0]
    run(first, make_request(PROMPT))
    other = make_engine(store=first.connector.store, clock=lambda: now[0])
    setattr(other.connector, hang, hang == "is_stuck")
    other.add(request := make_request(PROMPT))
    for _ in range(5):
        other.step()
    assert other.scheduler.make_stats().num_waiting_for_kv == 1
    now[0] = 61.0
    other.run()
    assert other.results[request.request_id].num_cached_tokens == 0
    assert other.results[request.request_id].finish_reason is FinishReason.LENGTH


def test_requests_with_another_salt_or_adapter_are_kept_apart():
    engine = make_engine()
    run(engine, make_request(PROMPT, cache_salt="a"))
    evict_device(engine)
    engine.scheduler._kv_cache.tier.clear()
    for request in (make_request(PROMPT), make_request(PROMPT, cache_salt="b")):
        engine.run(request)
        assert engine.results[request.request_id].num_cached_tokens == 0
    run(engine, request := make_request(PROMPT, cache_salt="a"))
    assert engine.results[request.request_id].num_cached_tokens == 20


def test_blocks_of_an_adapter_are_not_found_by_another_engine_whose_adapter_may_differ():
    first = make_engine(max_loras=1)
    first.run(make_request(PROMPT, lora_int_id=1))
    save_all(first)
    other = make_engine(store=first.connector.store, max_loras=1)
    other.run(request := make_request(PROMPT, lora_int_id=1))
    assert other.results[request.request_id].num_cached_tokens == 0


@pytest.mark.parametrize("restart", [True, False])
def test_after_new_weights_nothing_computed_before_is_loaded(restart):
    engine = make_engine(num_blocks=14)
    run(engine, make_request(PROMPT))
    waiting = make_request(PROMPT, max_tokens=2)
    engine.connector.is_stuck = True
    evict_device(engine)
    engine.scheduler._kv_cache.tier.clear()
    engine.add(waiting)
    engine.step()
    assert engine.scheduler.make_stats().num_waiting_for_kv == 1
    engine.scheduler.forget_computed(restart=restart)
    engine.scheduler.check_integrity()
    engine.connector.is_stuck = False
    engine.run()
    assert engine.results[waiting.request_id].num_cached_tokens == 0
    run(engine, again := make_request(PROMPT))
    assert engine.results[again.request_id].num_cached_tokens == 20  # of the new weights
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.restore_root()  # the weights of the start are back
    run(engine, again := make_request(PROMPT))
    assert engine.results[again.request_id].num_cached_tokens == 20


def test_a_reset_of_the_device_alone_keeps_host_memory():
    engine = make_engine(role="producer")
    run(engine, make_request(PROMPT))
    assert engine.scheduler.reset_prefix_cache(keeps_tiers=True)
    run(engine, request := make_request(PROMPT))
    assert engine.results[request.request_id].num_cached_tokens == 20
    assert engine.scheduler.reset_prefix_cache()
    run(engine, request := make_request(PROMPT))
    assert engine.results[request.request_id].num_cached_tokens == 0


def test_contents_that_may_be_wrong_are_forgotten_everywhere():
    engine = make_engine()
    run(engine, make_request(PROMPT))
    evict_device(engine)
    engine.add(request := make_request(PROMPT))
    engine.runner.failing.add(request.request_id)
    engine.run()
    assert engine.results[request.request_id].finish_reason is FinishReason.ERROR
    assert len(set(engine.connector.discarded)) >= 5 and not engine.connector.store
    engine.runner.failing.clear()
    run(engine, request := make_request(PROMPT))
    assert engine.results[request.request_id].num_cached_tokens == 0


def test_a_connector_that_raises_finds_nothing_and_does_not_end_the_engine(caplog):
    first = make_engine()
    run(first, make_request(PROMPT))
    other = make_engine(store=first.connector.store)
    other.connector.lookup = other.connector.start_save = other.connector.request_finished = None  # not callable
    other.run(request := make_request(PROMPT))
    assert other.results[request.request_id].num_cached_tokens == 0
    assert len([record for record in caplog.records if "'fake'" in record.getMessage()]) == 1


def test_the_last_output_tells_the_client_what_the_connector_says_and_the_blocks_are_saved_again():
    engine = make_engine()
    run(engine, make_request(PROMPT))
    engine.connector.params = {"host": "here"}
    engine.run(request := make_request(PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True}))
    assert engine.results[request.request_id].outputs[-1].kv_transfer_params == {"host": "here"}
    told, keys = engine.connector.finished[-1]
    assert told.kv_transfer_params == {"do_remote_decode": True} and len(keys) == 5
    save_all(engine)
    assert engine.connector.saved.count(keys[0]) == 2  # as the connector has told the client of it


def test_of_aborted_requests_connectors_are_told_too():
    engine = make_engine()
    engine.connector.params = {"host": "here"}
    engine.add(request := make_request(PROMPT, max_tokens=30))
    engine.step()
    engine.scheduler.abort_requests([request.request_id])
    engine.step()
    assert [told.request_id for told, _ in engine.connector.finished] == [request.request_id]
    assert not engine.scheduler.kv_loads._params


def test_a_consumer_saves_nothing_and_a_producer_looks_for_nothing():
    consumer = make_engine(role="consumer", tier={"max_saved_blocks": 0})
    run(consumer, make_request(PROMPT))
    assert not consumer.connector.saved and not consumer.scheduler._kv_cache.tier.blocks.num_saved
    first = make_engine()
    run(first, make_request(PROMPT))
    producer = make_engine(store=first.connector.store, role="producer")
    run(producer, request := make_request(PROMPT))
    assert producer.results[request.request_id].num_cached_tokens == 0


# ------------------------------------------------------------------------------------------------------------- swapping


def preempting_engine(mode: str, **settings) -> Engine:
    """Two requests of which the second one is preempted: 12 blocks, and each needs 9 at its end."""
    engine = make_engine(num_blocks=13, role="producer", preemption_mode=mode, **settings)
    engine.add(make_request(PROMPT, request_id="a", max_tokens=14))
    engine.add(make_request(PROMPT[::-1], request_id="b", max_tokens=14))
    while not engine.scheduler.make_stats().num_preemptions:
        engine.step()
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_swapped_request_loads_its_blocks_again(depth):
    engine = preempting_engine("swap", depth=depth)
    request = engine.scheduler.requests.by_id["b"]
    engine.step()
    assert request.is_swapped and request.status is RequestStatus.SWAPPED
    assert engine.scheduler.make_stats().num_swapped == 1
    before = engine.runner.num_computed["b"]
    assert len(engine.scheduler._kv_cache.tier._table_pins[request.table]) >= 5
    engine.run()
    recomputed = engine.runner.num_computed["b"] - before
    assert recomputed < 4 * (1 + depth) + 14
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
        tokens = expected_tokens(prompt, request.data.sampling_params, [], 64)
        assert engine.results[name].token_ids == tokens
    assert engine.scheduler.make_stats().num_swapped == 0
    assert not engine.scheduler._kv_cache.tier.keeps_for_requests


def test_without_room_in_host_memory_a_request_is_computed_again():
    engine = preempting_engine("swap", host_blocks=2)
    assert engine.scheduler.make_stats().num_swapped == 0
    engine.run()
    assert engine.results["b"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("bytes_per_second", "swaps"), [(1e9, True), (1.0, False), (0.0, True)])
def test_auto_swaps_where_copies_take_less_time_than_prompts(bytes_per_second, swaps):
    engine = make_engine(num_blocks=13, preemption_mode="auto", copy_costs=CopyCosts(100, 0, bytes_per_second))
    times = engine.scheduler._step_times
    for tokens in (0, 100, 0, 100):
        times.add_step(tokens, 0.001 + 0.001 * tokens)
    engine.scheduler._step_times = None  # what is measured from now on does not count
    engine.add(make_request(PROMPT, max_tokens=14), make_request(PROMPT[::-1], max_tokens=14))
    while not engine.scheduler.make_stats().num_preemptions:
        engine.step()
    assert engine.scheduler.make_stats().num_swapped == swaps
    engine.run()


def test_an_aborted_swapped_request_releases_its_host_blocks():
    engine = preempting_engine("swap")
    engine.scheduler.abort_requests(["b"])
    engine.scheduler.check_integrity()
    assert not engine.scheduler._kv_cache.tier.keeps_for_requests
    assert engine.scheduler.make_stats().num_swapped == 0
    engine.run()
