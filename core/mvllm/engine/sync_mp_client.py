"""An engine core in a process of its own, for a front end that drives it with `step()`.

The core runs by itself; `step` waits for the next news of it. Requests are sent when `step` is called (or anything else
is asked), all together: the core begins them together, as one in this process would.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import zmq

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core_channel import FrontChannel
from mvllm.engine.core_failure import core_exception
from mvllm.engine.core_launch import SLACK_SECONDS, CoreProcess
from mvllm.engine.kv_sizing import CacheSummary
from mvllm.errors import EngineDeadError
from mvllm.executor.message_queue.notifier import Notifier, make_notifier
from mvllm.executor.process_tools import keep_standard_streams
from mvllm.messages.core_protocol import AbortRequests, AddRequests, CallCore, CallResult, Command, CoreNews, StopCore
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
        self._step_limit = config.parallel.step_timeout + SLACK_SECONDS
        self._encoder = msgspec.msgpack.Encoder()
        self._new_ids: list[str] = []
        self._new_requests: list[msgspec.Raw] = []
        self._early: deque[EngineCoreOutputs] = deque()  # news that came while an answer was waited for
        self._results: dict[int, CallResult] = {}
        self._num_calls = 0
        self._taken = 0
        self._is_busy = False
        self._stats: SchedulerStats | None = None
        keep_standard_streams()
        # Nobody can guess it: a stranger who came first under the core's name would keep the core out.
        self._identity = b"core-0-" + secrets.token_hex(16).encode()
        channel = FrontChannel([self._identity])
        process = CoreProcess("EngineCore", config, chosen.source.name, channel.addresses[0])
        self._channel, self._process = channel, process
        self._wake = make_notifier()
        self._poller = zmq.Poller()
        self._poller.register(channel.news, zmq.POLLIN)
        self._poller.register(process.stop.fd, zmq.POLLIN)
        self._poller.register(self._wake.read_fd, zmq.POLLIN)
        # Also run when the client is dropped without a word, and when the interpreter ends.
        self._finalizer = weakref.finalize(self, _shut_down, process, channel, self._identity, self._wake, os.getpid())
        started = time.perf_counter()
        try:
            process.launch()
            meanwhile(config)
            ready = process.wait_ready()
            self._wait_connected()
        except BaseException:
            self.shutdown()
            raise
        self.cache_summary: CacheSummary = ready.cache_summary
        # The rest is what it takes until the process can begin: an interpreter and its imports.
        rest = time.perf_counter() - started - sum(ready.start_seconds.values())
        self.start_seconds = {"start engine core": rest, **ready.start_seconds}

    @property
    def core_pid(self) -> int:
        """The process id of the engine core."""
        return self._process.pid

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a validated request."""
        self._check()
        encoded = self._encoder.encode(request)
        self._new_ids.append(request.request_id)
        self._new_requests.append(msgspec.Raw(encoded))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Drops requests; unknown ids are ignored, and so is a core that has ended."""
        ids = list(request_ids)
        if ids and self._finalizer.alive and self._process.is_usable:
            with contextlib.suppress(EngineDeadError):  # whoever asks for something next is told
                self._send(AbortRequests(ids))

    def has_requests(self) -> bool:
        """Whether `step` has something to wait for."""
        if not self._finalizer.alive:
            return False
        return bool(self._early or self._new_ids or self._is_busy or self._is_behind())

    def step(self) -> EngineCoreOutputs:
        """Waits for what the core's next step has to tell. Returns empty outputs after `wake`.

        Raises:
            EngineDeadError: The core has failed; the cause is kept. Or its process has ended, or does not get on.
        """
        self._check()
        self._flush()
        started = time.monotonic()
        while not self._early:
            if not self.has_requests() or not self._wait(started):
                return EngineCoreOutputs(stats=self._stats)
        return self._early.popleft()

    def wake(self) -> None:
        """Has the `step` that waits, or the next one, return at once. From any thread, or a signal handler."""
        if self._finalizer.alive:
            self._wake.notify()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        return bool(self._call("reset_prefix_cache"))

    def check_health(self) -> None:
        """Raises unless the core and every worker answer."""
        self._call("check_health")

    def shutdown(self) -> None:
        """Ends the engine core and its workers. Idempotent."""
        self._finalizer()

    # --- inside

    def _call(self, method: str) -> bool | None:
        self._check()
        self._num_calls += 1
        call_id = self._num_calls
        self._send(CallCore(call_id, method))
        started = time.monotonic()
        while call_id not in self._results:
            self._wait(started)
        result = self._results.pop(call_id)
        if result.failure is not None:
            raise core_exception(result.failure)
        return result.value

    def _check(self) -> None:
        if not self._finalizer.alive:
            raise EngineDeadError("The engine core has been shut down.")
        if (failure := self._process.failure) is not None:
            raise _as_death(failure)

    def _is_behind(self) -> bool:
        """Whether the core has not yet said that it took every command."""
        return self._taken != self._channel.num_sent

    def _flush(self) -> None:
        if self._new_ids:
            command = AddRequests(self._new_ids, self._new_requests)
            self._new_ids, self._new_requests = [], []
            self._send_now(command)

    def _send(self, command: Command) -> None:
        self._flush()  # the core sees things in the order in which they were asked
        self._send_now(command)

    def _send_now(self, command: Command) -> None:
        failure: EngineDeadError | None = None
        try:
            self._channel.send(self._identity, command)
        except zmq.ZMQError as e:  # its end of the socket is closed: the news of its death are on their way
            failure = self._settle(EngineDeadError(f"The engine core cannot be reached: {e}"))
        if failure is not None:  # not raised above: it has a cause of its own to tell of
            raise failure

    def _settle(self, error: EngineDeadError) -> EngineDeadError:
        """Ends the engine core because of `error`, or of what was behind it; returns that."""
        return _as_death(self._process.settle(error))

    def _wait(self, started: float) -> bool:
        """Takes news in, waiting for some if there are none; False when it was woken instead.

        Args:
            started: When the caller began to wait, by the monotonic clock.
        """
        while True:
            news = self._channel.receive()
            if news is not None:
                self._take(news)
                return True
            # A step that is late or a core that does not even begin one: whichever began later counts.
            stalled = min(time.monotonic() - started, self._process.activity.seconds)
            if stalled >= self._step_limit:
                raise self._settle(self._process.stuck(self._step_limit, "has given no sign of life"))
            ready = {socket for socket, _ in self._poller.poll(_milliseconds(self._step_limit - stalled))}
            if self._channel.news in ready:
                continue
            if self._process.stop.fd in ready:
                raise self._settle(EngineDeadError("The engine core has been shut down."))
            if self._wake.read_fd in ready:
                self._wake.take()
                return False

    def _take(self, news: CoreNews) -> None:
        self._taken = news.taken
        self._is_busy = news.is_busy
        self._stats = news.outputs.stats or self._stats
        self._results.update((result.id, result) for result in news.results)
        self._early.append(news.outputs)

    def _wait_connected(self) -> None:
        poller = zmq.Poller()
        poller.register(self._channel.commands, zmq.POLLIN)
        poller.register(self._process.stop.fd, zmq.POLLIN)
        deadline = time.monotonic() + self._step_limit
        while not self._channel.all_here():
            self._process.check()
            if not poller.poll(_milliseconds(deadline - time.monotonic())):
                raise self._process.settle(self._process.stuck(self._step_limit, "has not connected"))


def _as_death(error: Exception) -> EngineDeadError:
    """`error`, or the error for what it means to a running engine."""
    if isinstance(error, EngineDeadError):
        return error
    death = EngineDeadError(f"The engine stopped: {type(error).__name__}: {error}")
    death.__cause__ = error
    return death


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1e3))


def _shut_down(process: CoreProcess, channel: FrontChannel, identity: bytes, wake: Notifier, pid: int) -> None:
    """The ladder: a message, then whatever WorkerGroup.end does, then the sockets."""
    if os.getpid() != pid:  # a fork of the front end's process: nothing of this is its own
        return
    if process.is_watched_here():  # by the garbage collector, which comes in any thread; this one has to see the end
        args = (process, channel, identity, wake, pid)
        threading.Thread(target=_shut_down, args=args, name="core-shutdown", daemon=True).start()
        return
    told = False
    try:
        if process.is_usable:
            process.expect_end()
            try:
                channel.send(identity, StopCore())
                told = True
            except zmq.ZMQError:  # it is on its way out already
                told = False
        process.end(told=told)
    finally:  # also when Ctrl-C interrupts what is above
        process.end(told=False)
        channel.close()
        process.close()
        wake.close()
