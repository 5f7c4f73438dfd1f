"""Asynchronous client of an engine core in another process, for AsyncLLM.

The event loop watches the socket's descriptor, and a callback reads the available messages: there is no thread or task
between socket and request. A loop that is late processes several steps at once. Requests are sent at the end of a loop
iteration in one message, so that the core starts them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import zmq

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.core.sleep import LONG_RUNNING_METHODS
from mvllm.engine.process.core_handshake import CoreReady
from mvllm.engine.process.launch import TIMEOUT_MARGIN_SECONDS, ChildProcess, failing_together
from mvllm.engine.process.remote_exceptions import rebuild_exception
from mvllm.engine.process.zmq_channel import ClientChannel
from mvllm.errors import EngineDeadError
from mvllm.executor.process.activity_table import Activity
from mvllm.messages.core_protocol import AbortRequests, AddRequests, CallUtility, Command
from mvllm.messages.lora import LoRARequest
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest, SchedulerStats

OnOutputs = Callable[[EngineCoreOutputs], None]
OnDeath = Callable[[EngineDeadError], None]

_MAX_UPDATES_PER_CALLBACK = 8  # then other callbacks of the loop run first


class CoreConnection(Protocol):
    """An engine core's process and its sockets. LaunchedCoreConnection documents the members."""

    @property
    def channel(self) -> ClientChannel: ...
    @property
    def unresponsive_timeout(self) -> float: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def pid(self) -> int: ...
    @property
    def activity(self) -> Activity: ...
    @property
    def shared_step_age(self) -> float: ...
    @property
    def failure_fd(self) -> int: ...
    def launch(self) -> None: ...
    def wait_ready(self) -> tuple[CoreReady, dict[str, float]]: ...
    def check_usable(self) -> None: ...
    def send(self, command: Command) -> int: ...
    def kill_unresponsive(self) -> None: ...
    def shutdown(self) -> None: ...


class AsyncMPClient:
    """Talks to an engine core. Made and shut down in any thread; all else happens in the loop's.

    Args:
        config: The settled configuration.
        link: The core, which this process starts or joins.
        platform_summary: The platform's name and the plugin it came from.

    Attributes:
        config, platform_summary: As given.
        stats: The scheduler's state as last told.
        cache_summary: The KV cache as it was sized.
        start_seconds: Seconds per start-up phase.
        num_acknowledged_requests: How many of the requests sent from here the core had taken when it was last heard of.
    """

    cache_summary: KVCacheSummary
    start_seconds: dict[str, float]

    def __init__(self, config: EngineConfig, link: CoreConnection, platform_summary: str) -> None:
        self.config = config
        self.platform_summary = platform_summary
        self.stats = SchedulerStats()
        self._link = link
        self._channel = link.channel
        self._encoder = msgspec.msgpack.Encoder()
        self._new_ids: list[str] = []
        self._new_requests: list[msgspec.Raw] = []
        self._aborted: list[str] = []
        self._will_flush = False
        self._calls: dict[int, asyncio.Future[bool | None]] = {}
        self._num_calls = 0
        self._num_acknowledged = 0
        self.num_acknowledged_requests = 0
        self._num_requests = 0
        self._unacknowledged: deque[tuple[int, int]] = deque()  # numbers of commands, and of requests sent up to each
        self._is_busy = False
        self._last_heard_at = 0.0  # or, where that is later, when the core was given something to do after a rest
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._on_outputs: OnOutputs = lambda outputs: None
        self._on_death: OnDeath = lambda error: None

    # --- its life

    def launch(self) -> None:
        """Starts the process; returns when it exists."""
        self._link.launch()

    def wait_ready(self) -> None:
        """Returns when requests can be sent.

        Raises:
            Exception: The core's own exception, if it cannot be started.
        """
        ready, self.start_seconds = self._link.wait_ready()
        self.cache_summary = ready.cache_summary

    def attach(self, loop: asyncio.AbstractEventLoop, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        """Starts to receive outputs in `loop`, which runs in the calling thread.

        Args:
            on_outputs: Called with each EngineCoreOutputs; its list of outputs may be empty.
            on_death: Called once, when the core can no longer be used.
        """
        self._loop, self._on_outputs, self._on_death = loop, on_outputs, on_death
        loop.add_reader(self._channel.update_fd, self._read_updates)
        loop.add_reader(self._link.failure_fd, self._handle_core_failure)
        self._read_updates()

    def shutdown(self) -> None:
        """Ends the engine core and its workers; calls under way get an EngineDeadError. Idempotent."""
        loop = self._loop
        self._detach()
        if loop is not None and not loop.is_closed():  # from now on, nobody would bring their answers
            loop.call_soon_threadsafe(self._fail_calls, "The engine core has been shut down.")
        self._link.shutdown()

    @property
    def core_pids(self) -> list[int]:
        """The process id of the engine core."""
        return [self._link.pid]

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the core can no longer be used, or None."""
        try:
            self._link.check_usable()
        except EngineDeadError as e:
            return e
        return None

    @property
    def heartbeat_age(self) -> float:
        """For how many seconds the core has given no sign of life although it has something to do; 0 if it has not."""
        if not self._is_busy and self._num_acknowledged == self._channel.num_sent:
            return self._link.shared_step_age
        # A step that is late or a core that does not even begin one: whichever began later counts.
        return min(time.monotonic() - self._last_heard_at, self._link.activity.seconds)

    # --- what it is told

    def add_requests(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Queues validated requests."""
        for request in requests:
            self._new_ids.append(request.request_id)
            self._new_requests.append(msgspec.Raw(self._encoder.encode(request)))
        self._flush_soon()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests; unknown ids are ignored, and so is a core that has ended."""
        self._aborted += request_ids
        if self._aborted:
            self._flush_soon()

    async def call_utility(self, method: str, argument: int | list[str] | LoRARequest | None = None) -> bool:
        """Calls a method of the core (see CallUtility) and returns whether it succeeded, where it says so.

        Raises:
            EngineDeadError: The core has ended.
            Exception: What the method raised.
        """
        self._link.check_usable()
        assert self._loop is not None
        self._flush()  # the core sees things in the order in which they were asked
        self._num_calls += 1
        call_id = self._num_calls
        answer = self._calls[call_id] = self._loop.create_future()
        try:
            self._send(CallUtility(call_id, method, argument))
            return bool(await answer)
        finally:
            self._calls.pop(call_id, None)

    @property
    def num_other_sequences(self) -> int:
        """Sequences that other front ends have under way: there are none."""
        return 0

    def on_sleep(self, callback: Callable[[bool], None]) -> None:
        """Nobody else puts this engine to sleep."""

    async def broadcast_sleep(self, is_sleeping: bool) -> None:
        """There is nobody to tell."""

    def _flush_soon(self) -> None:
        if not self._will_flush and self._loop is not None:
            self._will_flush = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        if self._loop is None or not self._link.is_open:  # the core has died: nobody takes what is said to it
            return
        if self._new_ids:
            command = AddRequests(self._new_ids, self._new_requests)
            self._num_requests += len(self._new_ids)
            self._new_ids, self._new_requests = [], []
            self._send(command)
            self._unacknowledged.append((self._channel.num_sent, self._num_requests))
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            self._send(AbortRequests(aborted))

    def _send(self, command: Command) -> None:
        assert self._loop is not None
        if not self._is_busy and self._num_acknowledged == self._channel.num_sent:
            self._last_heard_at = time.monotonic()
        # A core that cannot be reached has ended: what waits for it is told so when that is noticed.
        with contextlib.suppress(zmq.ZMQError):
            self._link.send(command)
        if self._heartbeat_timer is None:
            self._heartbeat_timer = self._loop.call_later(self._link.unresponsive_timeout, self._check_heartbeat)

    # --- receiving

    def _read_updates(self) -> None:
        for _ in range(_MAX_UPDATES_PER_CALLBACK):
            if self._loop is None or not self._link.is_open:
                return
            outputs = self._channel.receive()
            if outputs is None:
                return
            self._handle_outputs(outputs)
        if self._loop is not None:
            self._loop.call_soon(self._read_updates)  # the descriptor is edge-triggered: messages may be left

    def _handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._num_acknowledged = outputs.num_acknowledged
        while self._unacknowledged and self._unacknowledged[0][0] <= outputs.num_acknowledged:
            self.num_acknowledged_requests = self._unacknowledged.popleft()[1]
        self._is_busy = outputs.is_busy
        self._last_heard_at = time.monotonic()
        for result in outputs.utility_results:
            answer = self._calls.get(result.id)
            if answer is None or answer.done():
                continue
            if result.failure is not None:
                answer.set_exception(rebuild_exception(result.failure))
            else:
                answer.set_result(result.value)
        if outputs.stats is not None:
            self.stats = outputs.stats
        self._on_outputs(outputs)

    # --- its death

    def _handle_core_failure(self) -> None:
        """The process can no longer be used; why is known before this is called."""
        self._detach()
        error = self.failure or EngineDeadError("The engine core has been shut down.")
        self._fail_calls(str(error))
        self._on_death(error)

    def _fail_calls(self, reason: str) -> None:
        for answer in list(self._calls.values()):
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    def _check_heartbeat(self) -> None:
        """Ends a core that has work and does not get on."""
        assert self._loop is not None
        self._heartbeat_timer = None
        limit, age = self._link.unresponsive_timeout, self.heartbeat_age
        if self._link.activity.text in LONG_RUNNING_METHODS:  # the weights may be read again
            limit = max(limit, self.config.parallel.start_timeout + TIMEOUT_MARGIN_SECONDS)
        if age < limit:
            if self._is_busy or self._num_acknowledged != self._channel.num_sent:
                soon = min(limit - age, self._link.unresponsive_timeout)  # what comes next may be a step
                self._heartbeat_timer = self._loop.call_later(soon, self._check_heartbeat)
            return
        self._loop.run_in_executor(None, self._link.kill_unresponsive)

    def _detach(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        with contextlib.suppress(zmq.ZMQError):
            loop.remove_reader(self._channel.update_fd)
        loop.remove_reader(self._link.failure_fd)


def start_all(
    clients: Sequence[AsyncMPClient], meanwhile: Callable[[], None], processes: Sequence[ChildProcess] = ()
) -> None:
    """Starts cores side by side; they wait for requests when this returns.

    Args:
        meanwhile: Called while their processes start.
        processes: The cores', where there are several: none of them waits for one that has failed.

    Raises:
        Exception: A core's own exception, if one cannot be started. Nothing stays behind.
    """
    try:
        for client in clients:
            client.launch()
        meanwhile()
        with failing_together(processes):
            for client in clients:
                client.wait_ready()
    except BaseException:
        for client in clients:
            client.shutdown()
        raise
