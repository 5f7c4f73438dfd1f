"""Aborts in every state of a request."""

import pytest

from tests.unit.scheduler.builders import Engine, make_request, make_scheduler
from tests.unit.scheduler.fake_runner import expected_tokens


def assert_nothing_is_left(engine: Engine):
    engine.scheduler.check_integrity()
    assert not engine.scheduler.has_requests()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 0)
    assert engine.scheduler.make_stats().kv_cache_usage == 0.0
    while engine.in_flight:
        engine.collect()
    engine.step()
    assert not engine.runner.rows


def test_an_unknown_id_is_ignored():
    make_scheduler().abort_requests(["nobody"])


def test_a_waiting_request():
    engine = Engine(make_scheduler())
    engine.add(make_request(request_id="r"))
    engine.scheduler.abort_requests(["r", "r"])
    assert_nothing_is_left(engine)


def test_a_request_in_the_middle_of_its_prompt():
    engine = Engine(make_scheduler(max_num_batched_tokens=4))
    engine.add(make_request(20, request_id="r"))
    engine.step()
    engine.scheduler.abort_requests(["r"])
    assert_nothing_is_left(engine)


def test_a_running_request_has_no_further_output():
    engine = Engine(make_scheduler())
    engine.add(make_request(request_id="r"))
    engine.step()
    engine.scheduler.abort_requests(["r"])
    assert_nothing_is_left(engine)
    assert len(engine.results["r"].outputs) == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preempted_request(depth):
    engine = Engine(make_scheduler(num_blocks=7, block_size=4), depth=depth)
    engine.add(*[make_request(4, request_id=name, max_tokens=10) for name in "abc"])
    while not engine.scheduler.make_stats().num_preemptions:
        engine.step()
    engine.scheduler.abort_requests(["c"])
    engine.scheduler.check_integrity()
    assert engine.scheduler.num_waiting == 0
    engine.scheduler.abort_requests(["a", "b"])
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_request_with_results_in_flight(depth):
    engine = Engine(make_scheduler(), depth=depth)
    engine.add(make_request(request_id="r", max_tokens=9))
    engine.step()
    assert engine.in_flight
    engine.scheduler.abort_requests(["r"])
    assert_nothing_is_left(engine)
    assert engine.results["r"].outputs == []


@pytest.mark.parametrize("depth", [2, 3])
def test_results_of_an_aborted_request_are_not_given_to_the_next_one_in_its_row(depth):
    engine = Engine(make_scheduler(max_num_seqs=1), depth=depth)
    old, new = make_request(request_id="old", max_tokens=9), make_request(request_id="new")
    engine.add(old)
    engine.step()
    engine.scheduler.abort_requests(["old"])
    [result] = engine.run(new)
    assert result.token_ids == expected_tokens(new.prompt_token_ids, new.sampling_params, [], 64)
    assert engine.results["old"].outputs == []


def test_an_id_can_be_reused_while_results_of_its_former_request_are_in_flight():
    engine = Engine(make_scheduler(), depth=2)
    engine.add(make_request(request_id="r", max_tokens=9))
    engine.step()
    engine.scheduler.abort_requests(["r"])
    again = make_request(request_id="r")
    [result] = engine.run(again)
    assert result.token_ids == expected_tokens(again.prompt_token_ids, again.sampling_params, [], 64)


def test_blocks_of_an_aborted_request_stay_cached():
    engine = Engine(make_scheduler(block_size=4))
    engine.add(make_request(list(range(20)), request_id="r"))
    engine.step()
    engine.scheduler.abort_requests(["r"])
    [result] = engine.run(make_request(list(range(20))))
    assert result.num_cached_tokens == 16


def test_other_requests_continue():
    engine = Engine(make_scheduler())
    requests = [make_request(request_id=name) for name in "abc"]
    engine.add(*requests)
    engine.step()
    engine.scheduler.abort_requests(["b"])
    engine.run()
    assert [len(engine.results[name].token_ids) for name in "abc"] == [4, 1, 4]
