"""The synchronous client of an engine core process.

The core runs its busy loop; `step` waits for its next update. Added requests are sent together by the next `step` or
other command, so that the core starts them together, as an engine core in this process would.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import zmq

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.process.core_connection import milliseconds
from mvllm.engine.process.launched_core_connection import LaunchedCoreConnection
from mvllm.engine.process.mp_client import MPClient
from mvllm.errors import ConfigError, EngineDeadError
from mvllm.executor.message_queue.notifier import make_notifier
from mvllm.messages.commands import EngineCommand
from mvllm.messages.core_protocol import (
    AbortRequests,
    CallResult,
    CoreMessage,
)
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from mvllm.platform.choose import ChosenPlatform

R = TypeVar("R")

_NOT_IN_THIS_PROCESS = (
    "{} needs the engine core in this process, and it runs in a process of its own. Leave engine_core_process unset."
)


class SyncMPClient(MPClient):
    """Starts an engine core process and is its client. Used from one thread at a time.

    Args:
        config: The resolved configuration.
        chosen: The platform; the core's process finds it by its name.
        during_start: Called with the configuration while that process starts.

    Raises:
        Exception: On construction: the core's own exception, if it cannot be started. Nothing stays behind.
    """

    def __init__(
        self,
        config: EngineConfig,
        chosen: ChosenPlatform,
        during_start: Callable[[EngineConfig], None] = lambda config: None,
    ) -> None:
        self._connection: LaunchedCoreConnection = LaunchedCoreConnection("EngineCore", config, chosen.source.name)
        super().__init__(config, self._connection, str(chosen))
        self._process = self._connection.process
        self._unread_outputs: deque[EngineCoreOutputs] = deque()  # received while a call waited for its answer
        self._results: dict[int, CallResult] = {}
        self._stats: SchedulerStats | None = None
        self._interrupt_notifier = make_notifier()
        self._close_notifier = weakref.finalize(self, self._interrupt_notifier.close)
        self._poller = zmq.Poller()
        self._poller.register(self._channel.update_socket, zmq.POLLIN)
        self._poller.register(self._process.stop.fd, zmq.POLLIN)
        self._poller.register(self._interrupt_notifier.read_fd, zmq.POLLIN)
        try:
            self._connection.launch()
            during_start(config)
            self.wait_ready()
        except BaseException:
            self.shutdown()
            raise

    @property
    def core_pid(self) -> int:
        """The process id of the engine core."""
        return self._process.pid

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a validated request."""
        self._connection.check_usable()
        self._buffer_request(request)

    def collective_rpc(self, method: str, args: tuple[Any, ...], timeout: float | None) -> NoReturn:
        """Not available.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_NOT_IN_THIS_PROCESS.format("collective_rpc"))

    def apply_model(self, function: Callable[[Any], Any]) -> NoReturn:
        """Not available.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(_NOT_IN_THIS_PROCESS.format("apply_model"))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests; unknown ids are ignored, and so is a core that has exited."""
        ids = list(request_ids)
        if ids and self._connection.is_open and self._process.is_usable:
            with contextlib.suppress(EngineDeadError):  # the next other call raises it
                self._send(AbortRequests(ids))

    def has_requests(self) -> bool:
        """Whether `step` has something to wait for."""
        if not self._connection.is_open:
            return False
        return bool(self._unread_outputs or self._new_ids or self._expects_update)

    def step(self) -> EngineCoreOutputs:
        """Waits for the core's next update and returns its outputs; empty ones after `interrupt_step`.

        Raises:
            EngineDeadError: The core has failed (the cause is kept), its process has exited, or it is unresponsive.
        """
        self._connection.check_usable()
        self._flush()
        started = time.monotonic()
        while not self._unread_outputs:
            if not self.has_requests() or not self._wait(started):
                return EngineCoreOutputs(stats=self._stats)
        return self._unread_outputs.popleft()

    def interrupt_step(self) -> None:
        """Makes the `step` that waits, or the next one, return at once. From any thread, or a signal handler."""
        if self._connection.is_open:
            with contextlib.suppress(OSError):  # closed meanwhile
                self._interrupt_notifier.notify()

    def call(self, command: EngineCommand[R]) -> R:
        """The core's answer to a command; waits for the step in flight.

        Raises:
            EngineDeadError: The core has exited.
            Exception: What the core raised.
        """
        self._connection.check_usable()
        call = self._number_call(command)
        self._send(call)
        started = time.monotonic()
        while call.id not in self._results:
            self._wait(started)
        result = self._results.pop(call.id)
        if result.failure is not None:
            raise result.failure.to_exception()
        return result.value

    def shutdown(self) -> None:
        """Ends the engine core and its workers. Idempotent."""
        self._connection.shutdown()
        self._close_notifier()

    # --- inside

    def _flush(self) -> None:
        if (command := self._take_buffered_requests()) is not None:
            self._send_unflushed(command)

    def _send(self, command: CoreMessage) -> None:
        self._flush()  # the core processes commands in the order of the calls
        self._send_unflushed(command)

    def _send_unflushed(self, command: CoreMessage) -> None:
        failure: EngineDeadError | None = None
        try:
            self._connection.send(command)
        except zmq.ZMQError as e:  # it has closed its end of the socket: its exit will be reported
            failure = self._connection.terminate_with_error(EngineDeadError(f"The engine core cannot be reached: {e}"))
        if failure is not None:  # not raised above: it has its own cause
            raise failure

    def _wait(self, started: float) -> bool:
        """Handles the next update, waiting for it if there is none; returns False if `interrupt_step` ended the wait.

        Args:
            started: When the caller began to wait, in monotonic seconds.
        """
        while True:
            update = self._channel.receive()
            if update is not None:
                self._handle_outputs(update)
                return True
            # Either a step takes long, or the core does not start one: the later beginning counts.
            activity = self._connection.activity
            limit = self._silence_limit(activity)
            stalled = min(time.monotonic() - started, activity.seconds)
            if stalled >= limit:
                raise self._connection.terminate_with_error(
                    self._process.unresponsive_error(limit, "has given no sign of life")
                )
            ready = {socket for socket, _ in self._poller.poll(milliseconds(limit - stalled))}
            if self._channel.update_socket in ready:
                continue
            if self._process.stop.fd in ready:
                raise self._connection.terminate_with_error(EngineDeadError("The engine core has been shut down."))
            if self._interrupt_notifier.read_fd in ready:
                self._interrupt_notifier.drain()
                return False

    def _handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._record_progress(outputs)
        self._stats = outputs.stats or self._stats
        self._results.update((result.id, result) for result in outputs.call_results)
        self._unread_outputs.append(outputs)
