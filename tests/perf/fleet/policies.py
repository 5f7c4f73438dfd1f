"""Routing policies of a simulated fleet.

A policy sees what a router sees: what it has sent and what has ended (`view`), loads as replicas last reported them,
and, if it is prefix-aware, which replica has which prefix. Loads are in tokens, weighed as mvllm's routers do.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mvllm.kv_events.prefix_router import (
    EXPECTED_OUTPUT_TOKENS,
    OUTPUT_TOKEN_WEIGHT,
    RUNNING_TOKEN_WEIGHT,
    choose_spread,
)
from tests.perf.fleet.workload import Request


class View:
    """What routers know of `count` replicas. Arrays are by replica.

    Attributes:
        waiting, running, output: Prompt tokens that wait, tokens in the KV caches of running sequences, and output
            tokens expected of all sequences.
        accepts: Whether a replica may be chosen.
        sent: What this router has sent since the last report, as a cost. Others have sent as much, as far as it knows.
        num_others: Other routers.
        system_holders: By system prompt, whether each replica has cached it.
        conversation_holder: By conversation, the replicas that have cached it, and how many tokens.
    """

    def __init__(self, count: int, num_system_prompts: int) -> None:
        self.waiting = np.zeros(count)
        self.running = np.zeros(count)
        self.output = np.zeros(count)
        self.accepts = np.ones(count, dtype=bool)
        self.sent = 0.0
        self.num_others = 0
        self.system_holders = np.zeros((num_system_prompts, count), dtype=bool)
        self.conversation_holders: dict[int, dict[int, int]] = {}

    @property
    def count(self) -> int:
        """Number of replicas."""
        return len(self.waiting)

    def loads(self) -> np.ndarray:
        """The cost of each replica without the request; infinite where it accepts none."""
        cost = cost_of(self.waiting, self.running, self.output)
        cost[~self.accepts] = np.inf
        return cost

    def cached_tokens(self, request: Request) -> np.ndarray:
        """Prompt tokens of the request that each replica has cached."""
        cached = self.system_holders[request.system] * float(request.system_tokens)
        for replica, tokens in self.conversation_holders.get(request.conversation, {}).items():
            if self.system_holders[request.system, replica]:
                cached[replica] += min(tokens, request.history_tokens)
        return cached


def cost_of(waiting: np.ndarray, running: np.ndarray, output: np.ndarray) -> np.ndarray:
    """A load in tokens, weighed as mvllm's routers do."""
    return waiting + OUTPUT_TOKEN_WEIGHT * output + RUNNING_TOKEN_WEIGHT * running


class Policy(Protocol):
    """Chooses a replica."""

    def choose(self, request: Request, view: View) -> int:
        """The replica for a request. At least one accepts."""


class Random:
    """Any replica that accepts."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)

    def choose(self, request: Request, view: View) -> int:
        return int(self._rng.choice(np.flatnonzero(view.accepts)))


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: Request, view: View) -> int:
        while True:
            self._turn = (self._turn + 1) % view.count
            if view.accepts[self._turn]:
                return self._turn


class LeastTokens:
    """The replica with the lowest load."""

    def choose(self, request: Request, view: View) -> int:
        return int(np.argmin(view.loads()))


class TwoChoices:
    """The less loaded of two random replicas."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: Request, view: View) -> int:
        accepting = np.flatnonzero(view.accepts)
        pair = [int(accepting[self._rng.randrange(len(accepting))]) for _ in range(2)]
        loads = view.loads()[pair]
        return pair[int(loads[1] < loads[0])]


class PrefixCost:
    """The lowest load plus tokens that are not cached: mvllm's policy."""

    def choose(self, request: Request, view: View) -> int:
        return int(np.argmin(view.loads() - view.cached_tokens(request)))


class SpreadPrefixCost:
    """The cost as above; with other routers, at random among the replicas that would be filled up by what these have
    sent since the loads were reported: mvllm's policy with several front ends, see `routing_spread`."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: Request, view: View) -> int:
        costs = view.loads() - view.cached_tokens(request)
        unseen = view.num_others * (view.sent + request.new_tokens)
        return choose_spread(costs.tolist(), unseen, self._rng.random)


class PrefixCostOfFew:
    """The lowest cost, as above, among the replicas that have the conversation and `count` random ones. Routers with
    old loads do not all choose the same replica."""

    def __init__(self, count: int = 2, seed: int = 1) -> None:
        self._count = count
        self._rng = random.Random(seed)

    def choose(self, request: Request, view: View) -> int:
        accepting = np.flatnonzero(view.accepts)
        few = [int(accepting[self._rng.randrange(len(accepting))]) for _ in range(self._count)]
        few += [r for r in view.conversation_holders.get(request.conversation, ()) if view.accepts[r]]
        costs = view.loads()[few] - view.cached_tokens(request)[few]
        return few[int(np.argmin(costs))]


class LongestPrefix:
    """The replica with the longest cached prefix, unless its load is above `limit` times the mean, plus a request."""

    def __init__(self, limit: float | None = 1.5) -> None:
        self._limit = limit

    def choose(self, request: Request, view: View) -> int:
        loads, cached = view.loads(), view.cached_tokens(request)
        if self._limit is not None:
            most = self._limit * float(loads[view.accepts].mean()) + request.prompt_tokens + EXPECTED_OUTPUT_TOKENS
            cached[loads > most] = 0.0
        cached[~view.accepts] = -1.0
        best = cached.max()
        if best <= 0:
            return int(np.argmin(loads))
        loads[cached < best] = np.inf
        return int(np.argmin(loads))


class BoundedHashing:
    """Consistent hashing of the conversation, to the next replica on the ring whose load is at most `limit` times the
    mean (Mirrokni, Thorup and Zadimoghaddam, 2016). Needs no knowledge of caches."""

    def __init__(self, count: int, limit: float = 1.5, points: int = 64, seed: int = 1) -> None:
        rng = random.Random(seed)
        self._ring = sorted((rng.random(), replica) for replica in range(count) for _ in range(points))
        self._limit = limit

    def choose(self, request: Request, view: View) -> int:
        loads = view.loads()
        most = self._limit * float(loads[view.accepts].mean()) + request.prompt_tokens + EXPECTED_OUTPUT_TOKENS
        start = bisect.bisect(self._ring, (random.Random(request.conversation).random(), 0))
        for i in range(len(self._ring)):
            replica = self._ring[(start + i) % len(self._ring)][1]
            if replica < view.count and loads[replica] <= most:
                return replica
        return int(np.argmin(loads))


POLICIES: dict[str, Callable[[int], Policy]] = {
    "random": lambda count: Random(),
    "round robin": lambda count: RoundRobin(),
    "two choices": lambda count: TwoChoices(),
    "least tokens": lambda count: LeastTokens(),
    "bounded consistent hashing": BoundedHashing,
    "longest prefix, no limit": lambda count: LongestPrefix(None),
    "longest prefix, limit 1.5": lambda count: LongestPrefix(),
    "prefix cost (mvllm)": lambda count: PrefixCost(),
    "prefix cost, spread": lambda count: SpreadPrefixCost(),
    "prefix cost, holders and two": lambda count: PrefixCostOfFew(),
}
