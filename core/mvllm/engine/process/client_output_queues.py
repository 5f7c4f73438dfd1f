"""Per-client output queues of the engine core.

With one client, every output goes to it. With several, each output goes to the client that owns the request. Updates
without outputs are sent at most every 0.1 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from mvllm.messages.core_protocol import CallResult
from mvllm.messages.kv_events import CacheChanges, merge_changes
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, SchedulerStats

UPDATE_INTERVAL_SECONDS = 0.1
"""A client with unfinished requests gets an update at least this often, or once per step if steps are longer."""

OutputQueue = SimpleQueue[tuple[int, EngineCoreOutputs] | None]
"""(index of the client, outputs) for the output thread; None ends the thread."""

LoadReporter = Callable[[SchedulerStats, Sequence[int]], None]
"""Called with the scheduler's state and the number of unfinished sequences of each client."""


class _Client:
    """One client: its unfinished requests, what it is to receive, and what it was sent last."""

    def __init__(self) -> None:
        self.num_acknowledged = 0
        self.sent_num_acknowledged = 0
        self.sent_busy = False
        self.sent_at = 0.0
        self.outputs: list[EngineCoreOutput] = []
        self.results: list[CallResult] = []
        self.cache_changes: CacheChanges | None = None
        self.unfinished: set[str] = set()
        self.is_disconnected = False

    def needs_update(self, now: float, *, is_core_busy: bool) -> bool:
        """Whether to send an update now."""
        if self.outputs or self.results:
            return True
        if not (self.unfinished and is_core_busy):  # one last update acknowledges all its commands
            if self.sent_busy or self.num_acknowledged != self.sent_num_acknowledged:
                return True
            if self.cache_changes is None:
                return False
            if not is_core_busy:
                return True
        return now - self.sent_at >= UPDATE_INTERVAL_SECONDS


class ClientOutputQueues:
    """Collects what each client is to receive, and queues it for the output thread. Used by the core's main thread.

    `source` is the index of a client.

    Args:
        output_queue: The queue of the output thread.
        count: Number of clients.
        report_load: Called every 0.1 s while the core is busy, and when that changes.
    """

    def __init__(self, output_queue: OutputQueue, count: int, report_load: LoadReporter | None = None) -> None:
        self._output_queue = output_queue
        self._clients = [_Client() for _ in range(count)]
        self._owner: dict[str, _Client] = {}
        self._report_load = report_load
        self._reported_at = 0.0
        self._reported_busy = False

    def acknowledge(self, source: int, number: int) -> None:
        """Records the number of the last command received from a client."""
        self._clients[source].num_acknowledged = number

    def add_request(self, source: int, request_id: str) -> None:
        """Records that a client owns a request."""
        client = self._clients[source]
        self._owner[request_id] = client
        client.unfinished.add(request_id)

    def reject_request(self, source: int, output: EngineCoreOutput) -> None:
        """Queues the error output of a request that the core could not accept."""
        self._clients[source].outputs.append(output)

    def add_result(self, source: int, result: CallResult) -> None:
        """Queues the answer to a command."""
        self._clients[source].results.append(result)

    def pop_owned(self, source: int, request_ids: Sequence[str]) -> Sequence[str]:
        """Returns the requests that belong to the client, and forgets them."""
        client = self._clients[source]
        unique_ids = dict.fromkeys(request_ids)
        owned = [request_id for request_id in unique_ids if self._owner.get(request_id) is client]
        self._forget(owned)
        return owned

    def drop_client(self, source: int) -> Sequence[str]:
        """Disconnects a client that has died. Returns its unfinished requests, and forgets them."""
        client = self._clients[source]
        client.is_disconnected = True
        client.outputs.clear()
        client.results.clear()
        unfinished = list(client.unfinished)
        self._forget(unfinished)
        return unfinished

    def is_disconnected(self, source: int) -> bool:
        """Whether `drop_client` was called for the client. Its last commands may arrive after that."""
        return self._clients[source].is_disconnected

    def publish(self, outputs: EngineCoreOutputs, *, is_busy: bool) -> None:
        """Queues one step's outputs for the clients.

        Args:
            outputs: The outputs of one step. May be modified.
            is_busy: Whether the core has unfinished requests.
        """
        for output in outputs.outputs:
            owner = self._owner.get(output.request_id)
            if owner is None:
                continue  # aborted during the step
            owner.outputs.append(output)
            if output.finish_reason is not None:
                self._forget([output.request_id])
        now = time.monotonic()
        for index, client in enumerate(self._clients):
            if not client.is_disconnected:
                client.cache_changes = merge_changes(client.cache_changes, outputs.cache_changes)
            if not client.is_disconnected and client.needs_update(now, is_core_busy=is_busy):
                self._send(index, client, outputs, now, is_core_busy=is_busy)
        if self._report_load is not None and outputs.stats is not None:
            if now - self._reported_at >= UPDATE_INTERVAL_SECONDS or is_busy != self._reported_busy:
                self._report_load(outputs.stats, [len(each.unfinished) for each in self._clients])
                self._reported_at, self._reported_busy = now, is_busy

    def _send(self, index: int, client: _Client, outputs: EngineCoreOutputs, now: float, *, is_core_busy: bool) -> None:
        busy = bool(client.unfinished) and is_core_busy  # a core that is paused sends no updates
        update = EngineCoreOutputs(
            client.outputs,
            outputs.stats,
            client.num_acknowledged,
            busy,
            client.results,
            outputs.weight_version,
            client.cache_changes,
        )
        self._output_queue.put((index, update))
        client.outputs, client.results, client.cache_changes = [], [], None
        client.sent_num_acknowledged, client.sent_busy, client.sent_at = client.num_acknowledged, busy, now

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._owner.pop(request_id).unfinished.discard(request_id)


class SingleClientOutputQueue(ClientOutputQueues):
    """The output queue of a core with one client, which owns all requests: they are not tracked."""

    def __init__(self, output_queue: OutputQueue) -> None:
        super().__init__(output_queue, 1)

    def add_request(self, source: int, request_id: str) -> None:
        pass

    def pop_owned(self, source: int, request_ids: Sequence[str]) -> Sequence[str]:
        return request_ids

    def publish(self, outputs: EngineCoreOutputs, *, is_busy: bool) -> None:
        [client] = self._clients
        if client.outputs:  # of rejected requests
            outputs.outputs, client.outputs = client.outputs + outputs.outputs, []
        now = time.monotonic()
        if outputs.outputs or client.results or not is_busy or now - client.sent_at >= UPDATE_INTERVAL_SECONDS:
            outputs.num_acknowledged, outputs.is_busy = client.num_acknowledged, is_busy
            outputs.call_results, client.results = client.results, []
            outputs.cache_changes = merge_changes(client.cache_changes, outputs.cache_changes)
            client.cache_changes = None
            self._output_queue.put((0, outputs))
            client.sent_at = now
        else:
            client.cache_changes = merge_changes(client.cache_changes, outputs.cache_changes)


def make_output_queues(
    num_clients: int, output_queue: OutputQueue, report_load: LoadReporter | None = None
) -> ClientOutputQueues:
    """The output queues of a core with this number of clients."""
    return (
        SingleClientOutputQueue(output_queue)
        if num_clients == 1
        else ClientOutputQueues(output_queue, num_clients, report_load)
    )
