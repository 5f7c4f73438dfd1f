"""The simulation of a fleet agrees with closed forms of queueing theory, and loses and invents nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.perf.fleet.policies import POLICIES, LeastTokens, Policy, PrefixCost, RoundRobin
from tests.perf.fleet.simulator import Fleet, Outcome
from tests.perf.fleet.step_times import ACCELERATOR, StepTimes, fit
from tests.perf.fleet.workload import Conversations, Replay, Request, Workload, ideal_hit_rate

ONE_TURN = Workload(rate=1.0, seconds=1.0)


def poisson(rate: float, count: int, prompts: np.ndarray, outputs: np.ndarray, seed: int = 0) -> Replay:
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    return Replay(
        [Request(float(t), i, 0, 0, 0, int(p), int(o), 0) for i, (t, p, o) in enumerate(zip(times, prompts, outputs))]
    )


def run(times: StepTimes, requests: Conversations, replicas: int = 1, policy: Policy | None = None) -> Outcome:
    fleet = Fleet(times, replicas, policy or RoundRobin(), requests, 1, uses_cache=False)
    return fleet.run(1e12)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_prompts_alone_are_a_queue_with_exponential_service(load: float) -> None:
    """M/M/1: the mean time in the system is 1 / (mu - lambda)."""
    times = StepTimes(step=0.0, sequence=0.0, kv_token=0.0, prompt_token=1e-6)
    count = 8_000
    prompts = np.random.default_rng(5).exponential(1e6, count) + 1  # one second each
    outcome = run(times, poisson(load, count, prompts, np.ones(count)))
    assert outcome.ttft.mean() == pytest.approx(1 / (1 - load), rel=0.15)
    assert outcome.busy * outcome.replica_seconds == pytest.approx(prompts.sum() * 1e-6, rel=1e-3)


def test_constant_prompts_wait_half_as_long() -> None:
    """M/D/1: the mean wait is rho / (2 mu (1 - rho))."""
    times = StepTimes(step=0.0, sequence=0.0, kv_token=0.0, prompt_token=1e-3)
    count, load = 8_000, 0.7
    outcome = run(times, poisson(load, count, np.full(count, 1000), np.ones(count)))
    assert outcome.ttft.mean() - 1 == pytest.approx(load / (2 * (1 - load)), rel=0.15)


def test_generation_whose_steps_do_not_grow_is_a_queue_with_any_number_of_servers() -> None:
    """M/G/inf: nobody waits, and by Little's law rate x duration requests run at once."""
    times = StepTimes(step=0.01, sequence=0.0, kv_token=0.0, prompt_token=1e-9, max_sequences=10**6, kv_tokens=10**9)
    count, rate = 10_000, 40.0
    outputs = np.random.default_rng(3).geometric(1 / 200, count)
    outcome = run(times, poisson(rate, count, np.ones(count), outputs))
    assert np.nanmax(outcome.tpot) == pytest.approx(0.01, rel=1e-6)
    running = np.mean([n for time, _, n in outcome.timeline if 50 < time < 200])
    assert running == pytest.approx(rate * 200 * 0.01, rel=0.1)


def test_generation_whose_steps_grow_with_the_batch_shares_a_processor() -> None:
    """M/M/1 with processor sharing: the mean time is 1 / (mu - lambda), and a request of x takes x / (1 - rho)."""
    times = StepTimes(step=0.0, sequence=1e-3, kv_token=0.0, prompt_token=1e-9, max_sequences=10**6, kv_tokens=10**9)
    count, load = 8_000, 0.6
    outputs = np.random.default_rng(4).geometric(1 / 1000, count)  # one second each, alone
    outcome = run(times, poisson(load, count, np.ones(count), outputs))
    durations = outcome.ttft + np.nan_to_num(outcome.tpot) * (outputs_of(outcome, times, outputs) - 1)
    assert durations.mean() == pytest.approx(1 / (1 - load), rel=0.1)


def outputs_of(outcome: Outcome, times: StepTimes, outputs: np.ndarray) -> np.ndarray:
    """The output lengths in the order of the outcome, which is that of the ends."""
    return outputs[np.argsort(np.argsort(outcome.arrival))]


def test_equal_replicas_in_turn_are_independent_queues() -> None:
    """Round robin over two queues: arrivals of each are Erlang-2, so the wait is shorter than with random choice."""
    times = StepTimes(step=0.0, sequence=0.0, kv_token=0.0, prompt_token=1e-6)
    count = 8_000
    prompts = np.random.default_rng(6).exponential(1e6, count) + 1
    requests = poisson(1.4, count, prompts, np.ones(count))
    random, turns, least = (
        run(times, requests, 2, policy).ttft.mean() for policy in (POLICIES["random"](2), RoundRobin(), LeastTokens())
    )
    assert random == pytest.approx(1 / 0.3, rel=0.2)
    assert least < turns < random


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_under_failures_and_every_policy_ends(policy: str) -> None:
    count = 8
    load = Workload(rate=8.0, seconds=60.0, pause=5.0, num_system_prompts=20)
    conversations = Conversations(load, seed=2)

    def fail(fleet: Fleet, now: float) -> None:
        fleet.fail(3, now)
        fleet.call_later(now + 10, lambda fleet, time: fleet.start(3, time))

    changes = [
        (15.0, fail),
        (25.0, lambda fleet, now: fleet.drain(5)),
        (40.0, lambda fleet, now: fleet.start(5, now, 0.5)),
        (45.0, lambda fleet, now: fleet.add_replica(now) and None),
    ]
    fleet = Fleet(ACCELERATOR, count, POLICIES[policy](count), conversations, 20, changes=changes)
    outcome = fleet.run(1e9)
    assert outcome.num_left == 0 and len(outcome.ttft) == len(fleet.requests) > 500
    assert outcome.num_retries == sum(request.num_tries - 1 for request in fleet.requests) > 0
    assert (outcome.ttft > 0).all() and 0 < outcome.hit_rate < ideal_hit_rate(fleet.requests)
    assert outcome.prompt_tokens >= sum(request.prompt_tokens for request in fleet.requests)
    for replica in fleet.replicas:
        assert replica.num_requests == 0 and abs(replica.waiting_tokens) < 1 and abs(replica.output_tokens) < 1
        assert replica.cache.size == sum(replica.cache.systems.values()) + sum(replica.cache.conversations.values())
        assert replica.cache.size <= ACCELERATOR.kv_tokens
    for index, replica in enumerate(fleet.replicas):
        held = set(np.flatnonzero(fleet.view.system_holders[:, index]))
        assert held == set(replica.cache.systems)
        held = {number for number, holders in fleet.view.conversation_holders.items() if index in holders}
        assert held == set(replica.cache.conversations)


def test_a_prefix_policy_finds_more_and_waits_less() -> None:
    load = Workload(rate=12.0, seconds=60.0, pause=10.0)
    found = {}
    for name in ("round robin", "prefix cost (mvllm)"):
        fleet = Fleet(ACCELERATOR, 8, POLICIES[name](8), Conversations(load, seed=1), load.num_system_prompts)
        found[name] = fleet.run(1e9)
    blind, aware = found.values()
    assert aware.hit_rate > blind.hit_rate + 0.1 and aware.ttft.mean() < blind.ttft.mean()


def test_a_tier_finds_what_was_evicted_and_an_old_index_misses_what_is_cached() -> None:
    load = Workload(rate=12.0, seconds=60.0, pause=10.0)
    times = replace(ACCELERATOR, kv_tokens=100_000)
    rates = {}
    for name, options in {"old": {"index_seconds": 30.0}, "exact": {}, "tier": {"tier_tokens": 10**8}}.items():
        conversations = Conversations(load, seed=1)
        fleet = Fleet(times, 8, PrefixCost(), conversations, load.num_system_prompts, **options)  # type: ignore[arg-type]
        rates[name] = fleet.run(1e9).hit_rate
        for index, replica in enumerate(fleet.replicas):
            assert replica.cache.tier_size == sum(replica.cache.tier.values())
            held = {number for number, holders in fleet.view.conversation_holders.items() if index in holders}
            in_tier = {number for is_system, number in replica.cache.tier if not is_system}
            assert held == set(replica.cache.conversations) | in_tier
    assert rates["old"] + 0.02 < rates["exact"] < rates["tier"] - 0.02 < ideal_hit_rate(fleet.requests)


def test_arrivals_have_the_rate_and_burstiness_that_were_asked_for() -> None:
    load = Workload(rate=50.0, seconds=300.0, burstiness=2.0)
    gaps = np.diff([request.arrival for request in Conversations(load).first_requests()])
    assert 1 / gaps.mean() == pytest.approx(50, rel=0.06) and gaps.std() / gaps.mean() == pytest.approx(2, rel=0.08)
    daily = replace(load, daily=0.6)
    times = np.array([request.arrival for request in Conversations(daily).first_requests()])
    counts, _ = np.histogram(times, bins=4, range=(0, 300))
    assert counts[1] + counts[2] > 1.8 * (counts[0] + counts[3])


def test_step_times_are_fitted_to_measured_steps() -> None:
    true = StepTimes(step=5e-3, sequence=1e-4, kv_token=2e-8, prompt_token=4e-5)
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(50):
        n, kv, prompt = int(rng.integers(0, 64)), float(rng.integers(0, 100_000)), float(rng.integers(0, 2048))
        rows.append((n, kv, prompt, true.decode_step(n, kv) + true.prompt_token * prompt))
    found = fit(rows)
    for name in ("step", "sequence", "kv_token", "prompt_token"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6)
    worse = fit([(n, kv, prompt, seconds if n else seconds / 2) for n, kv, prompt, seconds in rows])
    assert min(worse.step, worse.sequence, worse.kv_token, worse.prompt_token) >= 0
    assert math.isfinite(worse.step)
