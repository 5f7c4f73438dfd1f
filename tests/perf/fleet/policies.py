"""Routing policies of a simulated fleet.

A policy sees what a router sees: what it has sent and what has ended (`view`), loads as replicas last reported them,
and, if it is prefix-aware, which replica has which prefix. Loads are in tokens, weighed as mvllm's routers do.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import numpy as np

from mvllm.kv_events.routing_cost import (
    EXPECTED_OUTPUT_TOKENS,
    OUTPUT_TOKEN_WEIGHT,
    RUNNING_TOKEN_WEIGHT,
    choose_spread,
)
from tests.perf.fleet.workload import Request


class View:
    """What routers know of `count` replicas. Arrays are by replica.

    A choice reads arrays and changes nothing; a report or a request that was sent changes one element. So the work per
    request in Python does not depend on the number of replicas.

    Attributes:
        costs: Loads in tokens, as the router that chooses knows them; infinite where a replica accepts none. Read only.
        accepts: Whether a replica may be chosen. Change it with `set_accepts`.
        accepting: The replicas that may be chosen.
        sent: What the router that chooses has sent since the last report, as a cost. Others have sent as much, as far
            as it knows.
        num_others: Other routers.
        system_holders: By system prompt, 1 for each replica that has cached it.
        conversation_holders: By conversation, the replicas that have cached it, and how many tokens.
    """

    def __init__(self, count: int, num_system_prompts: int, num_routers: int = 1) -> None:
        self.accepts = np.ones(count, dtype=bool)
        self.accepting = np.arange(count)
        self.sent = 0.0
        self.num_others = num_routers - 1
        self.system_holders = np.zeros((num_system_prompts, count))
        self.conversation_holders: dict[int, dict[int, int]] = {}
        self._reported = np.zeros((3, count))  # waiting, running, output
        self._costs = np.zeros((num_routers, count))
        self._sent: list[dict[int, list[int]]] = [{} for _ in range(num_routers)]  # by router and replica
        self._sent_in_all = [[0, 0, 0] for _ in range(num_routers)]
        self.costs = self._costs[0]

    @property
    def count(self) -> int:
        """Number of replicas."""
        return len(self.accepts)

    @property
    def waiting(self) -> np.ndarray:
        """Prompt tokens that wait, as last reported."""
        return self._reported[0]

    def report(self, replica: int, waiting: float, running: float, output: float) -> None:
        """A replica reports its load to a single router: prompt tokens that wait, tokens in the KV caches of running
        sequences, and output tokens expected of all sequences."""
        reported = self._reported
        reported[0, replica], reported[1, replica], reported[2, replica] = waiting, running, output
        if self.accepts[replica]:
            self.costs[replica] = cost_of(waiting, running, output)

    def report_all(self, loads: np.ndarray) -> None:
        """All replicas report their loads (3, replicas) to all routers."""
        self._reported[:] = loads
        self._costs[:] = np.where(self.accepts, cost_of(*self._reported), np.inf)
        for by_replica, total in zip(self._sent, self._sent_in_all, strict=True):
            by_replica.clear()
            total[:] = 0, 0, 0

    def select_router(self, router: int) -> None:
        """The router that chooses next."""
        self.costs = self._costs[router]
        self.sent = cost_of(*self._sent_in_all[router])

    def note_sent(self, router: int, replica: int, uncached: int, prompt: int, output: int) -> None:
        """A router has sent a request; the others do not know it before the next report."""
        tokens, total = self._sent[router].setdefault(replica, [0, 0, 0]), self._sent_in_all[router]
        for i, count in enumerate((uncached, prompt, output)):
            tokens[i] += count
            total[i] += count
        self._costs[router, replica] = self._cost(router, replica)

    def set_accepts(self, replica: int, accepts: bool) -> None:
        """Whether a replica may be chosen from now on."""
        self.accepts[replica] = accepts
        self.accepting = np.flatnonzero(self.accepts)
        for router, costs in enumerate(self._costs):
            costs[replica] = self._cost(router, replica) if accepts else np.inf

    def add_replica(self) -> None:
        """Another replica, without a load, that may be chosen."""

        def longer(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array, np.zeros((*array.shape[:-1], 1), array.dtype)], axis=-1)

        self.accepts, self.system_holders = longer(self.accepts), longer(self.system_holders)
        self._reported, self._costs = longer(self._reported), longer(self._costs)
        self.costs = self._costs[0]
        self.set_accepts(self.count - 1, True)

    def note_cached(self, replica: int, system: int, conversation: int, tokens: int) -> None:
        """A replica has cached a system prompt and so many tokens of a conversation."""
        self.system_holders[system, replica] = 1.0
        if tokens:
            self.conversation_holders.setdefault(conversation, {})[replica] = tokens

    def note_evicted(self, replica: int, entries: Iterable[tuple[bool, int]]) -> None:
        """A replica has evicted system prompts (True, number) and conversations (False, number)."""
        for is_system, number in entries:
            if is_system:
                self.system_holders[number, replica] = 0.0
                continue
            holders = self.conversation_holders.get(number, {})
            holders.pop(replica, None)
            if not holders:
                self.conversation_holders.pop(number, None)

    def cached_tokens(self, request: Request) -> np.ndarray:
        """Prompt tokens of the request that each replica has cached."""
        cached = self.system_holders[request.system] * float(request.system_tokens)
        for replica in self.conversation_holders.get(request.conversation, ()):
            cached[replica] = self.cached_tokens_of(request, replica)
        return cached

    def cached_tokens_of(self, request: Request, replica: int) -> int:
        """Prompt tokens of the request that one replica has cached."""
        if not self.system_holders[request.system, replica]:
            return 0
        history = self.conversation_holders.get(request.conversation, {}).get(replica, 0)
        return request.system_tokens + min(history, request.history_tokens)

    def _cost(self, router: int, replica: int) -> float:
        loads = self._reported[:, replica].tolist()
        sent = self._sent[router].get(replica, (0, 0, 0))
        return cost_of(loads[0] + sent[0], loads[1] + sent[1], loads[2] + sent[2])


Tokens = TypeVar("Tokens", float, np.ndarray)


def cost_of(waiting: Tokens, running: Tokens, output: Tokens) -> Tokens:
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
        return int(self._rng.choice(view.accepting))


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
        return int(view.costs.argmin())


def some(view: View, rng: random.Random, count: int) -> list[int]:
    """Random replicas that accept, perhaps the same one several times."""
    return [int(view.accepting[rng.randrange(len(view.accepting))]) for _ in range(count)]


class TwoChoices:
    """The less loaded of two random replicas."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: Request, view: View) -> int:
        first, second = some(view, self._rng, 2)
        return second if view.costs[second] < view.costs[first] else first


class PrefixCost:
    """The lowest load plus tokens that are not cached: mvllm's policy."""

    def choose(self, request: Request, view: View) -> int:
        return int((view.costs - view.cached_tokens(request)).argmin())


class SpreadPrefixCost:
    """The cost as above; with other routers, at random among the replicas that would be filled up by what these have
    sent since the loads were reported: mvllm's policy with several front ends, see `routing_spread`."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: Request, view: View) -> int:
        costs = view.costs - view.cached_tokens(request)
        best = int(costs.argmin())
        unseen = view.num_others * (view.sent + request.new_tokens)
        if not unseen:
            return best
        near = np.flatnonzero(costs - costs[best] <= unseen)  # no other one gets a share
        return int(near[choose_spread(costs[near].tolist(), unseen, self._rng.random)])


class PrefixCostOfFew:
    """The lowest cost, as above, among the replicas that have the conversation and `count` random ones. Routers with
    old loads do not all choose the same replica."""

    def __init__(self, count: int = 2, seed: int = 1) -> None:
        self._count = count
        self._rng = random.Random(seed)

    def choose(self, request: Request, view: View) -> int:
        few = some(view, self._rng, self._count)
        few += [r for r in view.conversation_holders.get(request.conversation, ()) if view.accepts[r]]
        return min(few, key=lambda replica: view.costs[replica] - view.cached_tokens_of(request, replica))


def limit_of(view: View, request: Request, factor: float) -> float:
    """The load that a replica may have to get the request: some times the mean, plus a request."""
    loads = view.costs if len(view.accepting) == view.count else view.costs[view.accepting]
    return factor * float(loads.mean()) + request.prompt_tokens + EXPECTED_OUTPUT_TOKENS


class LongestPrefix:
    """The replica with the longest cached prefix, unless its load is above `limit` times the mean, plus a request."""

    def __init__(self, limit: float | None = 1.5) -> None:
        self._limit = limit

    def choose(self, request: Request, view: View) -> int:
        loads, cached = view.costs.copy(), view.cached_tokens(request)
        if self._limit is not None:
            most = limit_of(view, request, self._limit)
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
        loads, most = view.costs, limit_of(view, request, self._limit)
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
