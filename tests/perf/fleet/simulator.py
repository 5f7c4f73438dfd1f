"""A discrete-event simulation of a fleet of replicas behind routers.

Events are arrivals, ends of prompts and sequences on a replica, and changes of the fleet. Each replica has at most one
valid event in the heap. A request costs three events or so, whatever the number of its tokens, so that a thousand
replicas can be simulated in about a minute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.perf.fleet.policies import Policy, View, cost_of
from tests.perf.fleet.replica import PrefixCache, Replica, Running
from tests.perf.fleet.step_times import StepTimes
from tests.perf.fleet.workload import Conversations, Request

_ARRIVAL, _REPLICA, _CHANGE = range(3)

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
    ) -> None:
        self.times = times
        self.policy = policy
        self.replicas = [Replica(times) for _ in range(num_replicas)]
        self.view = View(num_replicas, num_system_prompts)
        self.view.num_others = num_routers - 1
        self.outcome = Outcome(np.empty(0), np.empty(0), np.empty(0))
        self._conversations = conversations
        self._detect_seconds = detect_seconds
        self._max_waiting_tokens = max_waiting_tokens
        self._uses_cache = uses_cache
        self._report_seconds = report_seconds
        self._loads = np.zeros((2, 3, num_replicas))  # (true, as reported), (waiting, running, output), replica
        self._sent = np.zeros((num_routers, 3, num_replicas))  # since the last report
        self._heap: list[tuple[float, int, int, object]] = []
        self._number = 0
        self._finished: list[tuple[float, float, float]] = []
        self._under_way = 0
        self._alive_since = [0.0] * num_replicas
        self.requests: list[Request] = []
        for request in conversations.first_requests:
            self._push(request.arrival, _ARRIVAL, (request, request.arrival))
        for time, change in changes:
            self._push(time, _CHANGE, change)
        if report_seconds:
            self._push(report_seconds, _CHANGE, Fleet._report)

    def run(self, end: float, sample_seconds: float = 5.0) -> Outcome:
        """Simulates until `end`."""
        now, next_sample = 0.0, 0.0
        heap = self._heap
        while heap and heap[0][0] <= end:
            now, kind, _, item = heapq.heappop(heap)
            if now >= next_sample:
                self.outcome.timeline.append((now, int(self.view.accepts.sum()), self._under_way))
                next_sample = now + sample_seconds
            if kind == _ARRIVAL:
                self._route(now, *item)  # type: ignore[misc]
            elif kind == _REPLICA:
                index, version = item  # type: ignore[misc]
                if self.replicas[index].version == version:
                    self._advance(index, now)
            else:
                item(self, now)  # type: ignore[operator]
        for index, replica in enumerate(self.replicas):
            if replica.is_alive:
                self.outcome.replica_seconds += end - self._alive_since[index]
        rows = np.array(self._finished).reshape(-1, 3)
        result = self.outcome
        result.arrival, result.ttft, result.tpot = rows[:, 0], rows[:, 1], rows[:, 2]
        result.num_left = self._under_way
        result.busy = sum(replica.busy_seconds for replica in self.replicas) / max(1e-9, result.replica_seconds)
        return result

    # ------------------------------------------------------------------------------------------ changes of the fleet

    def fail(self, index: int, now: float, *, accepts_until_detected: bool = True) -> None:
        """A replica fails: its requests are sent again once that is noticed, its cache is lost."""
        replica = self.replicas[index]
        lost = replica.drop_all(now)
        replica.is_alive = False
        self.outcome.replica_seconds += now - self._alive_since[index]
        self._forget_cache(index)
        for array in (self.view.waiting, self.view.running, self.view.output):
            array[index] = 0.0
        if accepts_until_detected:
            self._push(now + self._detect_seconds, _CHANGE, lambda fleet, time: fleet.stop_routing(index))
        else:
            self.stop_routing(index)
        for running in lost:
            self._retry(now, running)

    def stop_routing(self, index: int) -> None:
        """Routers choose a replica no more."""
        if not self.replicas[index].is_alive or not self.replicas[index].accepts:
            self.view.accepts[index] = False

    def drain(self, index: int) -> None:
        """A replica gets no new requests."""
        self.replicas[index].accepts = False
        self.view.accepts[index] = False

    def start(self, index: int, now: float, speed: float = 1.0) -> None:
        """A replica (again) takes requests, with an empty cache."""
        replica = self.replicas[index]
        if not replica.is_alive:
            self._alive_since[index] = now
        replica.drop_all(now)
        replica.is_alive = replica.accepts = True
        replica.speed = speed
        self._forget_cache(index)
        self.view.accepts[index] = True

    def add_replica(self, now: float) -> int:
        """Adds a replica with an empty cache; returns its index."""
        view, index = self.view, len(self.replicas)
        self.replicas.append(Replica(self.times))
        self.replicas[index].advance(now)
        self._alive_since.append(now)
        view.waiting, view.running, view.output = (
            np.append(array, 0.0) for array in (view.waiting, view.running, view.output)
        )
        view.accepts = np.append(view.accepts, True)
        column = np.zeros((len(view.system_holders), 1), dtype=bool)
        view.system_holders = np.hstack([view.system_holders, column])
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

    def _route(self, now: float, request: Request, sent: float) -> None:
        view = self.view
        if not request.num_tries:
            self.requests.append(request)
            if self._max_waiting_tokens is not None:
                if view.waiting.sum() > self._max_waiting_tokens * max(1, int(view.accepts.sum())):
                    self.outcome.num_rejected += 1
                    return
            self._under_way += 1
        request.num_tries += 1
        if not view.accepts.any():
            self._push(now + self._detect_seconds, _ARRIVAL, (request, sent))
            return
        sent_by_router = self._sent[request.conversation % len(self._sent)]
        if self._report_seconds:
            view.waiting, view.running, view.output = self._loads[1] + sent_by_router
            view.sent = float(cost_of(*sent_by_router.sum(axis=1)))
        index = self.policy.choose(request, view)
        replica = self.replicas[index]
        if self._report_seconds:
            uncached = request.prompt_tokens - view.cached_tokens(request)[index]
            sent_by_router[:, index] += (uncached, request.prompt_tokens, request.output_tokens)
        running = Running(request, sent)
        if not replica.is_alive:
            self._retry(now, running)
            return
        if self._uses_cache:
            running.cached_tokens = min(replica.cache.find(request), request.prompt_tokens - 1)
        self.outcome.prompt_tokens += request.prompt_tokens
        self.outcome.cached_tokens += running.cached_tokens
        self._advance(index, now, schedules=False)
        replica.add(now, running)
        self._schedule(index)

    def _report(self, now: float) -> None:
        self._loads[1] = self._loads[0]
        self._sent[:] = 0.0
        if self._under_way or self._heap:
            self._push(now + self._report_seconds, _CHANGE, Fleet._report)

    def _retry(self, now: float, running: Running) -> None:
        self.outcome.num_retries += 1
        self._push(now + self._detect_seconds, _ARRIVAL, (running.request, running.sent))

    def _advance(self, index: int, now: float, *, schedules: bool = True) -> None:
        replica = self.replicas[index]
        started, ended = replica.advance(now)
        if self._uses_cache:
            for running in started:  # others find its prompt from now on
                self._note_cached(index, running.request)
        for running in ended:
            request, first = running.request, running.first_token
            count = request.output_tokens - 1
            self._finished.append((running.sent, first - running.sent, (now - first) / count if count else np.nan))
            self._under_way -= 1
            if self._uses_cache:
                evicted = replica.cache.store(request, replica.room_for_cache())
                self._note_cached(index, request)
                self._note_evicted(index, evicted)
            if (following := self._conversations.next_turn(request, now)) is not None:
                self._push(following.arrival, _ARRIVAL, (following, following.arrival))
        if schedules:
            self._schedule(index)

    def _schedule(self, index: int) -> None:
        replica, view = self.replicas[index], self.view
        loads = (replica.waiting_tokens, replica.running_tokens, replica.output_tokens)
        if self._report_seconds:
            self._loads[0, :, index] = loads
        else:
            view.waiting[index], view.running[index], view.output[index] = loads
        if (time := replica.next_event()) != float("inf"):
            self._push(time, _REPLICA, (index, replica.version))

    def _note_cached(self, index: int, request: Request) -> None:
        cache = self.replicas[index].cache
        if request.system not in cache.systems:
            cache.systems[request.system] = request.system_tokens
            cache.size += request.system_tokens
        self.view.system_holders[request.system, index] = True
        tokens = cache.conversations.get(request.conversation)
        if tokens is not None:
            self.view.conversation_holders.setdefault(request.conversation, {})[index] = tokens

    def _note_evicted(self, index: int, evicted: Sequence[tuple[bool, int]]) -> None:
        for is_system, number in evicted:
            if is_system:
                self.view.system_holders[number, index] = False
            else:
                holders = self.view.conversation_holders.get(number, {})
                holders.pop(index, None)
                if not holders:
                    self.view.conversation_holders.pop(number, None)

    def _forget_cache(self, index: int) -> None:
        self.view.system_holders[:, index] = False
        for number in [n for n, holders in self.view.conversation_holders.items() if index in holders]:
            self._note_evicted(index, [(False, number)])
        self.replicas[index].cache = PrefixCache(self.times.kv_tokens)
