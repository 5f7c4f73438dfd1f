"""A discrete-event simulation of a fleet of replicas behind routers.

Events are arrivals, ends of prompts and sequences on a replica, and changes of the fleet. Each replica has at most one
valid event in the heap. A request costs three events or so, whatever the number of its tokens and of the replicas: the
loads that a policy compares are changed one at a time, and compared by numpy.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.perf.fleet.policies import Policy, View
from tests.perf.fleet.replica import Replica, Running
from tests.perf.fleet.step_times import StepTimes
from tests.perf.fleet.workload import Conversations, Request

_ARRIVAL, _REPLICA, _CHANGE = range(3)
_Event = tuple[float, int, int, object]  # time, kind, number, what

Change = Callable[["Fleet", float], None]
"""A change of the fleet, called with it and the time."""


@dataclass
class Outcome:
    """Results of a run. Arrays are by finished request, times in seconds.

    Attributes:
        ttft: Time to first token, from the first try on.
        tpot: Time per output token behind the first; NaN for one token.
        arrival: When the request was sent first.
        prompt_tokens, cached_tokens: Of all computed prompts.
        num_retries: Requests that were sent again because their replica failed.
        num_rejected: Requests that were refused at the limit of waiting tokens.
        busy: Share of the time that replicas had work.
        replica_seconds: Seconds of all replicas that were alive.
        num_left: Requests that had not ended when the run did.
        timeline: (time, replicas that accept, requests under way) now and then.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    arrival: np.ndarray
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    num_retries: int = 0
    num_rejected: int = 0
    busy: float = 0.0
    replica_seconds: float = 0.0
    num_left: int = 0
    timeline: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / max(1.0, self.prompt_tokens)

    def between(self, start: float, end: float) -> np.ndarray:
        """Times to first token of the requests that arrived in a span of time."""
        return self.ttft[(self.arrival >= start) & (self.arrival < end)]


class Fleet:
    """The simulation.

    Args:
        times: Step times of a replica.
        num_replicas: Replicas at the start.
        policy: Chooses replicas.
        conversations: The requests.
        num_system_prompts: As in the workload.
        changes: (time, change) of the fleet.
        detect_seconds: How long a request that was sent to a failed replica waits until it is sent again.
        max_waiting_tokens: Requests are rejected while that many prompt tokens wait per replica, on average; None for
            no limit.
        uses_cache: Replicas cache prefixes.
        num_routers: Routers, among which requests are divided.
        report_seconds: How often replicas report their loads. A router adds what it has sent since; of others' requests
            it knows nothing. 0 for exact loads.
        index_seconds: How much later than a replica the routers know what it has cached and evicted.
        tier_tokens: Tokens that fit into a slower tier of each replica's cache. Routers take them for cached.
    """

    def __init__(
        self,
        times: StepTimes,
        num_replicas: int,
        policy: Policy,
        conversations: Conversations,
        num_system_prompts: int,
        *,
        changes: Sequence[tuple[float, Change]] = (),
        detect_seconds: float = 2.0,
        max_waiting_tokens: float | None = None,
        uses_cache: bool = True,
        num_routers: int = 1,
        report_seconds: float = 0.0,
        index_seconds: float = 0.0,
        tier_tokens: int = 0,
    ) -> None:
        self.times = times
        self.policy = policy
        self._tier_tokens = tier_tokens
        self.replicas = [Replica(times, tier_tokens) for _ in range(num_replicas)]
        self.view = View(num_replicas, num_system_prompts, num_routers if report_seconds else 1)
        self.outcome = Outcome(np.empty(0), np.empty(0), np.empty(0))
        self._conversations = conversations
        self._detect_seconds = detect_seconds
        self._max_waiting_tokens = max_waiting_tokens
        self._uses_cache = uses_cache
        self._report_seconds = report_seconds
        self._index_seconds = index_seconds
        self._num_routers = num_routers
        self._loads = np.zeros((3, num_replicas))  # to report: waiting, running, output
        self._heap: list[_Event] = []
        self._number = 0
        self._finished = array("d")  # time sent, to first token, per output token
        self._lost_seconds = 0.0  # of replicas that have failed, while they were alive
        self._under_way = 0
        self._alive_since = [0.0] * num_replicas
        self.requests: list[Request] = []
        self._first_requests = conversations.first_requests()
        self._next_first = next(self._first_requests, None)
        for time, change in changes:
            self._push(time, _CHANGE, change)
        if report_seconds:
            self._push(report_seconds, _CHANGE, Fleet._report)

    def run(self, end: float, sample_seconds: float = 5.0) -> Outcome:
        """Simulates until `end`."""
        next_sample = 0.0
        while (event := self._next_event(end)) is not None:
            now, kind, _, item = event
            if now >= next_sample:
                self.outcome.timeline.append((now, len(self.view.accepting), self._under_way))
                next_sample = now + sample_seconds
            if kind == _REPLICA:
                self._handle_replica(now, *item)  # type: ignore[misc]
            elif kind == _ARRIVAL:
                self._route(now, *item)  # type: ignore[misc]
            else:
                item(self, now)  # type: ignore[operator]
        return self._result(end)

    def _next_event(self, end: float) -> _Event | None:
        """Removes the next event; None if there is none until `end`. First requests are not kept in the heap."""
        heap, first = self._heap, self._next_first
        if first is not None and (not heap or first.arrival <= heap[0][0]):
            if first.arrival > end:
                return None
            self._next_first = next(self._first_requests, None)
            return first.arrival, _ARRIVAL, 0, (first, first.arrival)
        return heapq.heappop(heap) if heap and heap[0][0] <= end else None

    def _result(self, end: float) -> Outcome:
        result, rows = self.outcome, np.array(self._finished).reshape(-1, 3)
        alive = (
            end - since for since, replica in zip(self._alive_since, self.replicas, strict=True) if replica.is_alive
        )
        result.replica_seconds = self._lost_seconds + sum(alive)
        result.arrival, result.ttft, result.tpot = rows[:, 0], rows[:, 1], rows[:, 2]
        result.num_left = self._under_way
        result.busy = sum(replica.busy_seconds for replica in self.replicas) / max(1e-9, result.replica_seconds)
        return result

    # ------------------------------------------------------------------------------------------ changes of the fleet

    def fail(self, index: int, now: float, *, accepts_until_detected: bool = True) -> None:
        """A replica fails: its requests are sent again once that is noticed, its cache is lost."""
        replica = self.replicas[index]
        lost = replica.drop_all(now)
        self._forget_cache(index)
        replica.is_alive = False
        self._lost_seconds += now - self._alive_since[index]
        self._report_load(index, 0.0, 0.0, 0.0)
        if accepts_until_detected:
            self._push(now + self._detect_seconds, _CHANGE, lambda fleet, time: fleet.stop_routing(index))
        else:
            self.stop_routing(index)
        for running in lost:
            self._retry(now, running)

    def stop_routing(self, index: int) -> None:
        """Routers choose a replica no more."""
        if not self.replicas[index].is_alive or not self.replicas[index].accepts:
            self.view.set_accepts(index, False)

    def drain(self, index: int) -> None:
        """A replica gets no new requests."""
        self.replicas[index].accepts = False
        self.view.set_accepts(index, False)

    def start(self, index: int, now: float, speed: float = 1.0) -> None:
        """A replica (again) takes requests, with an empty cache."""
        replica = self.replicas[index]
        if not replica.is_alive:
            self._alive_since[index] = now
        replica.drop_all(now)
        replica.is_alive = replica.accepts = True
        replica.speed = speed
        self._forget_cache(index)
        self.view.set_accepts(index, True)

    def add_replica(self, now: float) -> int:
        """Adds a replica with an empty cache; returns its index."""
        index = len(self.replicas)
        self.replicas.append(Replica(self.times, self._tier_tokens))
        self.replicas[index].advance(now)
        self._alive_since.append(now)
        self._loads = np.concatenate([self._loads, np.zeros((3, 1))], axis=1)
        self.view.add_replica()
        return index

    def call_later(self, time: float, change: Change) -> None:
        """Calls `change` at a time."""
        self._push(time, _CHANGE, change)

    @property
    def under_way(self) -> int:
        """Requests that wait or run."""
        return self._under_way

    # -------------------------------------------------------------------------------------------------------- events

    def _push(self, time: float, kind: int, item: object) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, kind, self._number, item))

    def _handle_replica(self, now: float, index: int, version: int) -> None:
        """The next event of a replica, unless its rates have changed since."""
        if self.replicas[index].version == version:
            self._advance(index, now)
            self._schedule(index)

    def _route(self, now: float, request: Request, sent: float) -> None:
        view = self.view
        if not request.num_tries:
            self.requests.append(request)
            if self._max_waiting_tokens is not None:
                if view.waiting.sum() > self._max_waiting_tokens * max(1, len(view.accepting)):
                    self.outcome.num_rejected += 1
                    return
            self._under_way += 1
        request.num_tries += 1
        if not len(view.accepting):
            self._push(now + self._detect_seconds, _ARRIVAL, (request, sent))
            return
        index = self._choose(request)
        replica = self.replicas[index]
        running = Running(request, sent, work=request.prompt_tokens)
        if not replica.is_alive:
            self._retry(now, running)
            return
        if self._uses_cache:
            replica.find_cached(running)
        self.outcome.prompt_tokens += request.prompt_tokens
        self.outcome.cached_tokens += running.cached_tokens
        self._advance(index, now)
        replica.add(now, running)
        self._schedule(index)

    def _choose(self, request: Request) -> int:
        """The router's choice."""
        view = self.view
        if not self._report_seconds:
            return self.policy.choose(request, view)
        router = request.conversation % self._num_routers
        view.select_router(router)
        index = self.policy.choose(request, view)
        uncached = request.prompt_tokens - view.cached_tokens_of(request, index)
        view.note_sent(router, index, uncached, request.prompt_tokens, request.output_tokens)
        return index

    def _report(self, now: float) -> None:
        self.view.report_all(self._loads)
        if self._under_way or self._heap or self._next_first is not None:
            self._push(now + self._report_seconds, _CHANGE, Fleet._report)

    def _retry(self, now: float, running: Running) -> None:
        self.outcome.num_retries += 1
        self._push(now + self._detect_seconds, _ARRIVAL, (running.request, running.sent))

    def _advance(self, index: int, now: float) -> None:
        """Computes on a replica until `now`."""
        replica = self.replicas[index]
        started, ended = replica.advance(now)
        if self._uses_cache:
            for running in started:  # others find its prompt from now on
                self._note_cached(now, index, running.request)
        for running in ended:
            request, first = running.request, running.first_token
            count = request.output_tokens - 1
            self._finished.extend((running.sent, first - running.sent, (now - first) / count if count else np.nan))
            self._under_way -= 1
            if self._uses_cache:
                evicted = replica.cache.store(request, replica.room_for_cache())
                self._note_cached(now, index, request, evicted)
            if (following := self._conversations.next_turn(request, now)) is not None:
                self._push(following.arrival, _ARRIVAL, (following, following.arrival))

    def _schedule(self, index: int) -> None:
        """Reports a replica's load and pushes its next event."""
        replica = self.replicas[index]
        self._report_load(index, replica.waiting_tokens, replica.running_tokens, replica.output_tokens)
        if (time := replica.next_event()) != float("inf"):
            self._push(time, _REPLICA, (index, replica.version))

    def _report_load(self, index: int, waiting: float, running: float, output: float) -> None:
        if self._report_seconds:
            self._loads[:, index] = waiting, running, output
        else:
            self.view.report(index, waiting, running, output)

    def _note_cached(self, now: float, index: int, request: Request, evicted: Sequence[tuple[bool, int]] = ()) -> None:
        """Routers learn what a replica has cached for a request, and what it has evicted."""
        cache, view = self.replicas[index].cache, self.view
        cache.store_system(request)
        tokens = cache.tokens_of(request.conversation)

        if not self._index_seconds:
            view.note_cached(index, request.system, request.conversation, tokens)
            view.note_evicted(index, evicted)
            return

        def learn(fleet: Fleet, time: float) -> None:
            if fleet.replicas[index].cache is cache:  # it has not been emptied since
                view.note_cached(index, request.system, request.conversation, tokens)
                view.note_evicted(index, evicted)

        self._push(now + self._index_seconds, _CHANGE, learn)

    def _forget_cache(self, index: int) -> None:
        """Empties a replica's cache."""
        self.view.system_holders[:, index] = 0.0
        numbers = [number for number, holders in self.view.conversation_holders.items() if index in holders]
        self.view.note_evicted(index, [(False, number) for number in numbers])
        self.replicas[index].drop_cache()
