"""Requests go where they cost least: waiting tokens, running tokens, and the tokens that are not cached there."""

from __future__ import annotations

import numpy as np
import pytest

from mvllm.extension_api.kv_events import EXPECTED_OUTPUT_TOKENS, prefix_keys
from mvllm_router.prefix_router import PrefixRouter, ReplicaLoad
from tests.perf.fleet.policies import PrefixCost, View
from tests.perf.fleet.workload import Request

SHARED = list(range(6400))


def router_of(*names: str, has_events: bool = False) -> PrefixRouter[str]:
    router: PrefixRouter[str] = PrefixRouter()
    for name in names:
        router.add_replica(name, has_events=has_events)
    return router


def test_equal_replicas_are_chosen_in_turn():
    router = router_of("A", "B", "C")
    assert sorted(router.choose([i]).replica for i in range(6)) == ["A", "A", "B", "B", "C", "C"]


def test_a_prompt_goes_where_its_prefix_was_sent_and_elsewhere_when_that_is_too_busy():
    router = router_of("A", "B")
    first = router.choose(SHARED)
    router.prompt_computed(first)
    sent = [router.choose([*SHARED, i]) for i in range(80)]
    assert [each.replica for each in sent[:8]] == [first.replica] * 8
    assert all(each.num_cached_tokens == 6400 for each in sent[:8])
    assert {each.replica for each in sent} == {"A", "B"}
    for each in (first, *sent):
        router.finish(each)
    assert router.cost("A") == router.cost("B") == 0


def test_what_events_say_outweighs_what_was_sent():
    router = router_of("A", "B", has_events=True)
    keys = prefix_keys(SHARED, router.chunk)
    router.index.store("B", keys)
    routed = router.choose(SHARED)
    assert (routed.replica, routed.num_cached_tokens) == ("B", 6400)
    router.finish(routed)
    router.index.clear("B")
    router.index.store("A", keys)
    assert router.choose(SHARED).replica == "A"


def test_what_was_sent_counts_until_the_prompt_is_computed():
    router = router_of("A", "B", has_events=True)
    first = router.choose(SHARED, num_output_tokens=1)
    router.report("B" if first.replica == "A" else "A", ReplicaLoad(waiting_tokens=1000))
    second = router.choose(SHARED, num_output_tokens=1)
    assert second.replica == first.replica and second.num_cached_tokens == 6400
    router.prompt_computed(first)  # its events have arrived: there are none
    router.finish(first)
    router.finish(second)
    assert router.choose(SHARED).num_cached_tokens == 0


def test_load_is_counted_in_tokens():
    router = router_of("A", "B")
    long = router.choose(SHARED)
    others = [router.choose([i] * 100) for i in range(10)]
    assert {each.replica for each in others} == {"A", "B"} - {long.replica}
    router = router_of("A", "B")
    router.report("A", ReplicaLoad(running_tokens=100_000))  # few long sequences
    assert {router.choose([i]).replica for i in range(10)} == {"B"}
    router.report("A", ReplicaLoad())
    router.report("B", ReplicaLoad(waiting_tokens=10 * EXPECTED_OUTPUT_TOKENS))
    assert router.choose([1]).replica == "A"
    router.report("unknown", ReplicaLoad())


def test_a_prompt_that_does_not_fit_into_free_blocks_waits():
    router = router_of("A", "B")
    router.report("A", ReplicaLoad(free_tokens=1000))
    router.report("B", ReplicaLoad(waiting_tokens=1000, free_tokens=100_000))
    assert router.choose(SHARED).replica == "B"
    assert router.choose([1, 2, 3]).replica == "A"


def test_replicas_come_and_go():
    router = router_of("A", "B")
    lost = [router.choose(SHARED), router.choose([1])]
    router.remove_replica("A")
    assert router.choose(SHARED).replica == "B"
    router.add_replica("A")
    for each in lost:  # of the A that is gone
        router.prompt_computed(each)
        router.finish(each)
        router.finish(each)
    assert router.cost("A") == 0
    assert router.choose([7], among=["B"]).replica == "B"
    router.remove_replica("A")
    router.remove_replica("B")
    with pytest.raises(LookupError, match="No replica"):
        router.choose([1])


def test_a_simulated_fleet_routes_alike() -> None:
    """The policy of the simulation of fleets and PrefixRouter choose alike when both know the same."""
    rng = np.random.default_rng(8)
    for _ in range(200):
        router: PrefixRouter[int] = PrefixRouter(chunk=1)
        view = View(4, 1)
        prompt = list(range(int(rng.integers(1, 2000))))
        for replica in range(4):
            router.add_replica(replica)
            waiting, running, cached = (int(rng.integers(0, limit)) for limit in (3000, 9000, len(prompt) + 1))
            router.report(replica, ReplicaLoad(waiting, running))
            view.report(replica, waiting, running, 0)
            router.index.store(replica, prefix_keys(prompt[:cached], 1))
            view.system_holders[0, replica] = True
            view.conversation_holders.setdefault(0, {})[replica] = cached
        request = Request(0.0, 0, 0, 0, len(prompt), 0, 1, 0)
        loads = view.costs - view.cached_tokens(request)
        chosen = router.choose(prompt).replica
        assert loads[chosen] == loads.min() == loads[PrefixCost().choose(request, view)]
