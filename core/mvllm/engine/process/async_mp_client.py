"""The asyncio client of an engine core process.

The event loop watches the socket's descriptor, and a callback reads all messages there are: no thread and no task is
between socket and request, and a late loop reads several steps at once. Requests are sent together at the end of the
loop's iteration, so that the core starts them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import zmq

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.process.core_connection import CoreConnection
from mvllm.engine.process.launch import ChildProcess, failing_together
from mvllm.engine.process.mp_client import MPClient
from mvllm.errors import EngineDeadError
from mvllm.messages.commands import EngineCommand
from mvllm.messages.core_protocol import AbortRequests, CoreMessage
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest, SchedulerStats

R = TypeVar("R")

OnOutputs = Callable[[EngineCoreOutputs], None]
OnDeath = Callable[[EngineDeadError], None]
OnSleep = Callable[[bool], None]

_MAX_UPDATES_PER_CALLBACK = 8  # then other callbacks of the loop run


class AsyncMPClient(MPClient):
    """Client of one engine core. Constructed and shut down in any thread; everything else runs in the loop's thread.

    Args:
        config: The resolved configuration.
        connection: The core, started by this process or by another one.
        platform_summary: The platform's name and the plugin it came from.

    Attributes:
        stats: The last reported state of the scheduler.
        num_acknowledged_requests: How many of this client's requests the core had received at its last update.
    """

    def __init__(self, config: EngineConfig, connection: CoreConnection, platform_summary: str) -> None:
        super().__init__(config, connection, platform_summary)
        self.stats = SchedulerStats()
        self._aborted: list[str] = []
        self._will_flush = False
        self._calls: dict[int, asyncio.Future[bool | None]] = {}
        self.num_acknowledged_requests = 0
        self._num_requests = 0
        self._unacknowledged: deque[tuple[int, int]] = deque()  # (command number, requests sent up to it)
        self._last_update_at = 0.0  # or, if later, when an idle core was sent a command
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._on_outputs: OnOutputs = lambda outputs: None
        self._on_death: OnDeath = lambda error: None

    # --- start and shutdown

    def launch(self) -> None:
        """Starts the process; returns when it exists."""
        self._connection.launch()

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_outputs: OnOutputs,
        on_death: OnDeath,
        on_sleep: OnSleep = lambda is_sleeping: None,
    ) -> None:
        """Starts to read updates in `loop`, which runs in the calling thread.

        Args:
            on_outputs: Called with the outputs of each update, which may be empty but for the stats.
            on_death: Called once, when the core can no longer be used.
            on_sleep: Not called: the core has no other front end.
        """
        self._loop, self._on_outputs, self._on_death = loop, on_outputs, on_death
        loop.add_reader(self._channel.update_fd, self._read_updates)
        loop.add_reader(self._connection.failure_fd, self._handle_core_failure)
        self._read_updates()

    def shutdown(self) -> None:
        """Closes the connection; pending calls raise EngineDeadError. Idempotent."""
        loop = self._loop
        self._detach()
        if loop is not None and not loop.is_closed():  # no update is read any more
            loop.call_soon_threadsafe(self._fail_calls, "The engine core has been shut down.")
        self._connection.shutdown()

    @property
    def core_pids(self) -> list[int]:
        """The process id of the engine core."""
        return [self._connection.pid]

    def describe_cores(self) -> list[str]:
        """See `AsyncLLM.describe_cores`."""
        return [f"Engine core {self._connection.pid} ({self._connection.activity}):\n{self._connection.dump_stack()}"]

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the core can no longer be used, or None."""
        try:
            self._connection.check_usable()
        except EngineDeadError as e:
            return e
        return None

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the last update of a core that has work; 0 without work."""
        if not self._expects_update:
            return self._connection.shared_step_age
        # Either a step takes long, or the core does not start one: the later beginning counts.
        return min(time.monotonic() - self._last_update_at, self._connection.activity.seconds)

    # --- commands

    def add_requests(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Queues validated requests."""
        for request in requests:
            self._buffer_request(request)
        self._flush_soon()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests; unknown ids are ignored, and so is a core that has exited."""
        self._aborted += request_ids
        if self._aborted:
            self._flush_soon()

    async def call(self, command: EngineCommand[R]) -> R:
        """The core's answer to a command.

        Raises:
            EngineDeadError: The core has exited.
            Exception: What the core raised.
        """
        self._connection.check_usable()
        assert self._loop is not None
        self._flush()  # the core processes commands in the order of the calls
        call = self._number_call(command)
        answer = self._calls[call.id] = self._loop.create_future()
        try:
            self._send(call)
            return await answer
        finally:
            self._calls.pop(call.id, None)

    @property
    def num_other_sequences(self) -> int:
        """0: the core has no other front end."""
        return 0

    async def broadcast_sleep(self, is_sleeping: bool) -> None:
        """Does nothing: the core has no other front end."""

    def _flush_soon(self) -> None:
        if not self._will_flush and self._loop is not None:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        if self._loop is None or not self._connection.is_open:  # the core has exited
            return
        if (command := self._take_buffered_requests()) is not None:
            self._num_requests += len(command.request_ids)
            self._send(command)
            self._unacknowledged.append((self._channel.num_sent, self._num_requests))
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            self._send(AbortRequests(aborted))

    def _send(self, command: CoreMessage) -> None:
        assert self._loop is not None
        if not self._expects_update:
            self._last_update_at = time.monotonic()
        # A core that cannot be reached has exited: `_handle_core_failure` will be called.
        with contextlib.suppress(zmq.ZMQError):
            self._connection.send(command)
        if self._heartbeat_timer is None:
            self._heartbeat_timer = self._loop.call_later(self._connection.unresponsive_timeout, self._check_heartbeat)

    # --- updates

    def _read_updates(self) -> None:
        for _ in range(_MAX_UPDATES_PER_CALLBACK):
            if self._loop is None or not self._connection.is_open:
                return
            outputs = self._channel.receive()
            if outputs is None:
                return
            self._handle_outputs(outputs)
        if self._loop is not None:
            self._loop.call_soon(self._read_updates)  # the descriptor reports no more unread messages

    def _handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._record_progress(outputs)
        while self._unacknowledged and self._unacknowledged[0][0] <= outputs.num_acknowledged:
            self.num_acknowledged_requests = self._unacknowledged.popleft()[1]
        self._last_update_at = time.monotonic()
        for result in outputs.call_results:
            answer = self._calls.get(result.id)
            if answer is None or answer.done():
                continue
            if result.failure is not None:
                answer.set_exception(result.failure.to_exception())
            else:
                answer.set_result(result.value)
        if outputs.stats is not None:
            self.stats = outputs.stats
        self._on_outputs(outputs)

    # --- failure

    def _handle_core_failure(self) -> None:
        """Called by the loop when `failure_fd` is readable; the failure has been set before."""
        self._detach()
        error = self.failure or EngineDeadError("The engine core has been shut down.")
        self._fail_calls(str(error))
        self._on_death(error)

    def _fail_calls(self, reason: str) -> None:
        for answer in list(self._calls.values()):
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    def _check_heartbeat(self) -> None:
        """Ends a core that has work and sends no updates."""
        assert self._loop is not None
        self._heartbeat_timer = None
        limit, age = self._silence_limit(self._connection.activity), self.heartbeat_age
        if age < limit:
            if self._expects_update:
                soon = min(limit - age, self._connection.unresponsive_timeout)  # a step may follow the long call
                self._heartbeat_timer = self._loop.call_later(soon, self._check_heartbeat)
            return
        self._loop.run_in_executor(None, self._connection.kill_unresponsive)

    def _detach(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        with contextlib.suppress(zmq.ZMQError):
            loop.remove_reader(self._channel.update_fd)
        loop.remove_reader(self._connection.failure_fd)


def start_all(
    clients: Sequence[AsyncMPClient], during_start: Callable[[], None], processes: Sequence[ChildProcess] = ()
) -> None:
    """Starts cores in parallel; they are ready when this returns.

    Args:
        during_start: Called while their processes start.
        processes: The cores' processes, where there are several: the first failure ends the wait for all of them.

    Raises:
        Exception: A core's own exception, if one cannot be started. Nothing stays behind.
    """
    try:
        for client in clients:
            client.launch()
        during_start()
        with failing_together(processes):
            for client in clients:
                client.wait_ready()
    except BaseException:
        for client in clients:
            client.shutdown()
        raise
