"""An engine core in a process of its own, for a front end that drives it with `step()`.

The core runs by itself; `step` waits for the next news of it. Requests are sent when `step` is called (or anything else
is asked), all together: the core begins them together, as one in this process would.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.core.sleep import LONG_RUNNING_METHODS
from mvllm.engine.process.launch import TIMEOUT_MARGIN_SECONDS
from mvllm.engine.process.launched_core_connection import LaunchedCoreConnection, milliseconds
from mvllm.engine.process.remote_exceptions import rebuild_exception
from mvllm.errors import EngineDeadError
from mvllm.executor.message_queue.notifier import make_notifier
from mvllm.messages.core_protocol import (
    AbortRequests,
    AddRequests,
    CallUtility,
    Command,
    UtilityResult,
)
from mvllm.messages.lora import LoRARequest
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from mvllm.platform.choose import ChosenPlatform


class SyncMPClient:
    """Starts an engine core and talks to it. Used from one thread at a time.

    Args:
        config: The settled configuration.
        chosen: The platform to run on, which the core's process finds again by its name.
        meanwhile: Called with the configuration while that process starts.

    Attributes:
        config: The configuration the engine runs with.
        platform_summary: The platform's name and the plugin it came from.
        cache_summary: The KV cache as it was sized.
        start_seconds: Seconds per start-up phase.

    Raises:
        Exception: On construction: the core's own exception, if it cannot be started. Nothing stays behind.
    """

    def __init__(
        self,
        config: EngineConfig,
        chosen: ChosenPlatform,
        meanwhile: Callable[[EngineConfig], None] = lambda config: None,
    ) -> None:
        self.config = config
        self.platform_summary = str(chosen)
        self._encoder = msgspec.msgpack.Encoder()
        self._new_ids: list[str] = []
        self._new_requests: list[msgspec.Raw] = []
        self._unread_outputs: deque[EngineCoreOutputs] = deque()  # news that came while an answer was waited for
        self._results: dict[int, UtilityResult] = {}
        self._num_calls = 0
        self._num_acknowledged = 0
        self._is_busy = False
        self._stats: SchedulerStats | None = None
        self._link = LaunchedCoreConnection("EngineCore", config, chosen.source.name)
        self._channel, self._process = self._link.channel, self._link.process
        self._interrupt_notifier = make_notifier()
        self._close_wake = weakref.finalize(self, self._interrupt_notifier.close)
        self._poller = zmq.Poller()
        self._poller.register(self._channel.update_socket, zmq.POLLIN)
        self._poller.register(self._process.stop.fd, zmq.POLLIN)
        self._poller.register(self._interrupt_notifier.read_fd, zmq.POLLIN)
        try:
            self._link.launch()
            meanwhile(config)
            ready, self.start_seconds = self._link.wait_ready()
        except BaseException:
            self.shutdown()
            raise
        self.cache_summary: KVCacheSummary = ready.cache_summary

    @property
    def core_pid(self) -> int:
        """The process id of the engine core."""
        return self._process.pid

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a validated request."""
        self._link.check_usable()
        encoded = self._encoder.encode(request)
        self._new_ids.append(request.request_id)
        self._new_requests.append(msgspec.Raw(encoded))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests; unknown ids are ignored, and so is a core that has ended."""
        ids = list(request_ids)
        if ids and self._link.is_open and self._process.is_usable:
            with contextlib.suppress(EngineDeadError):  # whoever asks for something next is told
                self._send(AbortRequests(ids))

    def has_requests(self) -> bool:
        """Whether `step` has something to wait for."""
        if not self._link.is_open:
            return False
        return bool(self._unread_outputs or self._new_ids or self._is_busy or self._has_unacknowledged())

    def step(self) -> EngineCoreOutputs:
        """Waits for what the core's next step has to tell. Returns empty outputs after `wake`.

        Raises:
            EngineDeadError: The core has failed; the cause is kept. Or its process has ended, or does not get on.
        """
        self._link.check_usable()
        self._flush()
        started = time.monotonic()
        while not self._unread_outputs:
            if not self.has_requests() or not self._wait(started):
                return EngineCoreOutputs(stats=self._stats)
        return self._unread_outputs.popleft()

    def interrupt_step(self) -> None:
        """Has the `step` that waits, or the next one, return at once. From any thread, or a signal handler."""
        if self._link.is_open:
            self._interrupt_notifier.notify()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        return bool(self.call_utility("reset_prefix_cache"))

    def sleep(self, level: int) -> None:
        """Gives memory back; see `EngineCore.sleep`."""
        self.call_utility("sleep", level)

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Claims it again; see `EngineCore.wake_up`."""
        return bool(self.call_utility("wake_up", list(tags)))

    def add_lora(self, request: LoRARequest) -> None:
        """Loads an adapter; see `EngineCore.add_lora`."""
        self.call_utility("add_lora", request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forgets it; see `EngineCore.remove_lora`."""
        return bool(self.call_utility("remove_lora", lora_int_id))

    def check_health(self) -> None:
        """Raises unless the core and every worker answer."""
        self.call_utility("check_health")

    def shutdown(self) -> None:
        """Ends the engine core and its workers. Idempotent."""
        self._link.shutdown()
        self._close_wake()

    # --- inside

    def call_utility(self, method: str, argument: int | list[str] | LoRARequest | None = None) -> bool | None:
        self._link.check_usable()
        self._num_calls += 1
        call_id = self._num_calls
        self._send(CallUtility(call_id, method, argument))
        started = time.monotonic()
        while call_id not in self._results:
            self._wait(started)
        result = self._results.pop(call_id)
        if result.failure is not None:
            raise rebuild_exception(result.failure)
        return result.value

    def _has_unacknowledged(self) -> bool:
        """Whether the core has not yet said that it took every command."""
        return self._num_acknowledged != self._channel.num_sent

    def _flush(self) -> None:
        if self._new_ids:
            command = AddRequests(self._new_ids, self._new_requests)
            self._new_ids, self._new_requests = [], []
            self._send_unflushed(command)

    def _send(self, command: Command) -> None:
        self._flush()  # the core sees things in the order in which they were asked
        self._send_unflushed(command)

    def _send_unflushed(self, command: Command) -> None:
        failure: EngineDeadError | None = None
        try:
            self._link.send(command)
        except zmq.ZMQError as e:  # its end of the socket is closed: the news of its death are on their way
            failure = self._link.terminate_with_error(EngineDeadError(f"The engine core cannot be reached: {e}"))
        if failure is not None:  # not raised above: it has a cause of its own to tell of
            raise failure

    def _wait(self, started: float) -> bool:
        """Takes news in, waiting for some if there are none; False when it was woken instead.

        Args:
            started: When the caller began to wait, by the monotonic clock.
        """
        while True:
            news = self._channel.receive()
            if news is not None:
                self._handle_update(news)
                return True
            # A step that is late or a core that does not even begin one: whichever began later counts.
            activity, limit = self._process.activity, self._link.unresponsive_timeout
            if activity.text in LONG_RUNNING_METHODS:  # the weights may be read again
                limit = max(limit, self.config.parallel.start_timeout + TIMEOUT_MARGIN_SECONDS)
            stalled = min(time.monotonic() - started, activity.seconds)
            if stalled >= limit:
                raise self._link.terminate_with_error(self._process.stuck(limit, "has given no sign of life"))
            ready = {socket for socket, _ in self._poller.poll(milliseconds(limit - stalled))}
            if self._channel.update_socket in ready:
                continue
            if self._process.stop.fd in ready:
                raise self._link.terminate_with_error(EngineDeadError("The engine core has been shut down."))
            if self._interrupt_notifier.read_fd in ready:
                self._interrupt_notifier.drain()
                return False

    def _handle_update(self, news: EngineCoreOutputs) -> None:
        self._num_acknowledged = news.num_acknowledged
        self._is_busy = news.is_busy
        self._stats = news.stats or self._stats
        self._results.update((result.id, result) for result in news.utility_results)
        self._unread_outputs.append(news)
