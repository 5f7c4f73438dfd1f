"""What an engine core still has to tell its front ends: to each what is its own, and nothing where it is no news.

A core with one front end follows no single request: whatever a step brings is for that one. With several, it knows
whose each request is, from its coming to its end.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from mvllm.messages.core_protocol import UtilityResult
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, SchedulerStats

UPDATE_INTERVAL_SECONDS = 0.1
"""While there is work, a front end hears at least this often (or once per step) how far the core is."""

OutputQueue = SimpleQueue[tuple[int, EngineCoreOutputs] | None]
"""News and whom they are for; None ends it."""

LoadReporter = Callable[[SchedulerStats, Sequence[int]], None]
"""Told the scheduler's state, and the number of unfinished sequences of each front end."""


class ClientOutputQueues(ABC):
    """Used by the core's own thread.

    Args:
        output_queue: Where news go.
    """

    def __init__(self, output_queue: OutputQueue) -> None:
        self._output_queue = output_queue

    @abstractmethod
    def acknowledge(self, source: int, number: int) -> None:
        """A front end's command of this number has been taken."""

    @abstractmethod
    def add_request(self, source: int, request_id: str) -> None:
        """A request of a front end's has been queued."""

    @abstractmethod
    def reject_request(self, source: int, output: EngineCoreOutput) -> None:
        """A request has ended before it could begin."""

    @abstractmethod
    def add_result(self, source: int, result: UtilityResult) -> None:
        """A call has been answered."""

    @abstractmethod
    def pop_owned(self, source: int, request_ids: Sequence[str]) -> Sequence[str]:
        """Those that a front end may abort; they count as ended."""

    @abstractmethod
    def drop_client(self, source: int) -> Sequence[str]:
        """A front end has died. Returns the requests that it leaves behind; they count as ended."""

    def is_disconnected(self, source: int) -> bool:
        """Whether a front end has died: what it said last may still come, after the news of its death."""
        return False

    @abstractmethod
    def publish(self, outputs: EngineCoreOutputs, *, is_busy: bool) -> None:
        """Passes on what there is to tell.

        Args:
            outputs: Of one step.
            is_busy: Whether the core has work left.
        """


class SingleClientOutputQueue(ClientOutputQueues):
    """All news are for the one front end."""

    def __init__(self, output_queue: OutputQueue) -> None:
        super().__init__(output_queue)
        self._num_acknowledged = 0
        self._sent_at = 0.0
        self._rejected: list[EngineCoreOutput] = []
        self._results: list[UtilityResult] = []

    def acknowledge(self, source: int, number: int) -> None:
        self._num_acknowledged = number

    def add_request(self, source: int, request_id: str) -> None:
        pass

    def reject_request(self, source: int, output: EngineCoreOutput) -> None:
        self._rejected.append(output)

    def add_result(self, source: int, result: UtilityResult) -> None:
        self._results.append(result)

    def pop_owned(self, source: int, request_ids: Sequence[str]) -> Sequence[str]:
        return request_ids

    def drop_client(self, source: int) -> Sequence[str]:
        return ()

    def publish(self, outputs: EngineCoreOutputs, *, is_busy: bool) -> None:
        if self._rejected:
            outputs.outputs = self._rejected + outputs.outputs
            self._rejected = []
        now = time.monotonic()
        if outputs.outputs or self._results or not is_busy or now - self._sent_at >= UPDATE_INTERVAL_SECONDS:
            outputs.num_acknowledged, outputs.is_busy = self._num_acknowledged, is_busy
            outputs.utility_results, self._results = self._results, []
            self._output_queue.put((0, outputs))
            self._sent_at = now


class _ClientState:
    """What one of several is to be told."""

    def __init__(self) -> None:
        self.num_acknowledged = 0
        self.sent_num_acknowledged = 0
        self.sent_busy = False
        self.sent_at = 0.0
        self.outputs: list[EngineCoreOutput] = []
        self.results: list[UtilityResult] = []
        self.unfinished: set[str] = set()
        self.is_disconnected = False

    def has_new_output(self, now: float) -> bool:
        """Something has happened, or it has waited for long enough."""
        if self.outputs or self.results:
            return True
        if not self.unfinished:  # it has nothing here: news are that all it said has been heard, and once
            return self.sent_busy or self.num_acknowledged != self.sent_num_acknowledged
        return now - self.sent_at >= UPDATE_INTERVAL_SECONDS


class MultiClientOutputQueues(ClientOutputQueues):
    """Sorts news by whose they are.

    Args:
        count: How many front ends there are.
        report: Told how much there is to do, now and then while there is, and when that ends.
    """

    def __init__(self, output_queue: OutputQueue, count: int, report: LoadReporter | None = None) -> None:
        super().__init__(output_queue)
        self._clients = [_ClientState() for _ in range(count)]
        self._owner: dict[str, _ClientState] = {}
        self._report_load = report
        self._reported_at = 0.0
        self._reported_busy = False

    def acknowledge(self, source: int, number: int) -> None:
        self._clients[source].num_acknowledged = number

    def add_request(self, source: int, request_id: str) -> None:
        front_end = self._clients[source]
        self._owner[request_id] = front_end
        front_end.unfinished.add(request_id)

    def reject_request(self, source: int, output: EngineCoreOutput) -> None:
        self._clients[source].outputs.append(output)

    def add_result(self, source: int, result: UtilityResult) -> None:
        self._clients[source].results.append(result)

    def pop_owned(self, source: int, request_ids: Sequence[str]) -> Sequence[str]:
        front_end = self._clients[source]
        named = dict.fromkeys(request_ids)  # whoever names one twice means it once
        own = [request_id for request_id in named if self._owner.get(request_id) is front_end]
        self._forget(own)
        return own

    def drop_client(self, source: int) -> Sequence[str]:
        front_end = self._clients[source]
        front_end.is_disconnected = True
        front_end.outputs.clear()
        front_end.results.clear()
        left = list(front_end.unfinished)
        self._forget(left)
        return left

    def is_disconnected(self, source: int) -> bool:
        return self._clients[source].is_disconnected

    def publish(self, outputs: EngineCoreOutputs, *, is_busy: bool) -> None:
        for output in outputs.outputs:
            owner = self._owner.get(output.request_id)
            if owner is None:
                continue  # it was aborted while this step was under way
            owner.outputs.append(output)
            if output.finish_reason is not None:
                self._forget([output.request_id])
        now = time.monotonic()
        for index, front_end in enumerate(self._clients):
            if not front_end.is_disconnected and front_end.has_new_output(now):
                self._send(index, front_end, outputs.stats, now)
        if self._report_load is not None and outputs.stats is not None:
            if now - self._reported_at >= UPDATE_INTERVAL_SECONDS or is_busy != self._reported_busy:
                self._report_load(outputs.stats, [len(each.unfinished) for each in self._clients])
                self._reported_at, self._reported_busy = now, is_busy

    def _send(self, index: int, front_end: _ClientState, stats: SchedulerStats | None, now: float) -> None:
        busy = bool(front_end.unfinished)
        outputs = EngineCoreOutputs(front_end.outputs, stats, front_end.num_acknowledged, busy, front_end.results)
        self._output_queue.put((index, outputs))
        front_end.outputs, front_end.results = [], []
        front_end.sent_num_acknowledged, front_end.sent_busy, front_end.sent_at = front_end.num_acknowledged, busy, now

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            front_end = self._owner.pop(request_id)
            front_end.unfinished.discard(request_id)


def make_output_queues(
    num_front_ends: int, output_queue: OutputQueue, report: LoadReporter | None = None
) -> ClientOutputQueues:
    """The desk for a core with so many front ends."""
    return (
        SingleClientOutputQueue(output_queue)
        if num_front_ends == 1
        else MultiClientOutputQueues(output_queue, num_front_ends, report)
    )
