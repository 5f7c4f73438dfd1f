"""A model server as a child process of the router."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mvllm.extension_api import EngineDeadError, ModelError
from mvllm.extension_api.processes import ChildProcess, CoreHandle, MessageSocket, message_socket_pair
from mvllm.extension_api.server import EngineArgs, HeartbeatMonitor, KeyCounters, RateLimiter, ServerSettings
from mvllm_router.connection_passing import ConnectionSender, connection_socket_pair
from mvllm_router.model_client import ModelClient
from mvllm_router.model_entry import ModelEntry
from mvllm_router.model_server_proc import ModelServerHandshake, ModelServerStart, ReceivedSignal

T = TypeVar("T")

_EXIT_POLL_SECONDS = 0.02
_FINAL_RESPONSES_SECONDS = 10.0  # for a model server to end, after the time for its last requests
_ABORT_SECONDS = 2.0  # between the first signal and the one that aborts requests


class ModelServerHandle(CoreHandle):
    """The router's handle of a model server process."""

    module = "mvllm_router.model_server_proc"
    handshake_type = ModelServerHandshake
    num_bytes = 0
    max_model_len: int | None = None

    def receive_handshake(self) -> ModelServerHandshake | None:
        handshake = super().receive_handshake()
        if isinstance(handshake, ModelServerHandshake) and handshake.failure is None:
            self.num_bytes, self.max_model_len = handshake.num_bytes, handshake.max_model_len
        assert handshake is None or isinstance(handshake, ModelServerHandshake)
        return handshake


class ModelServerProcess:
    """A model server: starts its process, opens connections to it, watches and ends it. One object for one load.

    Args:
        entry: The model.
        index: Its row of the counters of rate limits.
        key_counters: These counters; None without limits.
        on_death: Called in the event loop's thread when the process dies after it was ready.
        after_end: Called in another thread when the process has ended.

    Attributes:
        client: Sends requests to the process.
    """

    def __init__(
        self,
        entry: ModelEntry,
        index: int,
        key_counters: KeyCounters | None,
        on_death: Callable[[Exception], None],
        after_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._after_end = after_end
        self._entry = entry
        self._index = index
        self._key_counters = key_counters
        self._on_death = on_death
        self._process: ChildProcess | None = None
        self._control: MessageSocket | None = None
        self._stopping: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_ready = False
        self._internal_key = secrets.token_urlsafe(32)
        connections, self._listener = connection_socket_pair()
        self.client = ModelClient(ConnectionSender(connections), self._internal_key)

    @property
    def num_bytes(self) -> int:
        """The memory of weights and KV cache; 0 before it is ready."""
        return 0 if self._handle is None else self._handle.num_bytes

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence, in tokens; None before it is ready."""
        return None if self._handle is None else self._handle.max_model_len

    async def check(self) -> None:
        """Checks that the files of a model with a local path are there.

        Raises:
            ModelError: They are not.
        """
        model = self._entry.engine.model
        path = Path(model).expanduser()
        if (path.is_absolute() or model.startswith(".")) and ":" not in path.name and not path.exists():
            raise ModelError(f"The model {model!r} was not found: the path does not exist.")

    async def start(self) -> None:
        """Starts the process; returns when it accepts requests.

        Raises:
            Exception: The failure of the process.
        """
        loop = asyncio.get_running_loop()
        with contextlib.closing(self._listener):
            ours, theirs = message_socket_pair()
            with theirs:
                self._control = MessageSocket(ours)
                process = self._process = self._make_process(theirs.fileno())
                await run_in_thread(process.launch)
        process.on_failure(lambda error: _call_in_loop(loop, self._on_failure, error))
        await run_in_thread(lambda: process.wait_handshake(self._entry.engine.start_timeout))
        process.check()  # it may have died since
        self._is_ready = True
        self._watch = asyncio.create_task(self._watch_heartbeats(process))

    async def stop(self, *, abort: bool = False) -> None:
        """Ends the process: after its requests, or at once while it starts. Idempotent.

        Args:
            abort: End its requests, too, with the finish reason `abort`.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(abort))
        await asyncio.shield(self._stopping)

    async def _stop(self, abort: bool) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await run_in_thread(lambda: self._end_process(abort))
        self.client.close()
        self._listener.close()
        if self._key_counters is not None:
            num_keys = RateLimiter.num_keys(self._entry.settings.limits_by_key or {})
            self._key_counters.clear_in_flight(self._index, num_keys)

    @property
    def _handle(self) -> ModelServerHandle | None:
        if self._process is None or not self._process.workers:
            return None
        handle = self._process.workers[0]
        assert isinstance(handle, ModelServerHandle)
        return handle

    def _make_process(self, control_messages_fd: int) -> ChildProcess:
        entry, counters = self._entry, self._key_counters
        start = ModelServerStart(
            name=f"Model_{entry.name}",
            engine_args=engine_arguments(entry.engine),
            settings=model_server_settings(entry, self._internal_key),
            listener_fd=self._listener.fileno(),
            control_messages_fd=control_messages_fd,
            index=self._index,
            key_counters_fd=None if counters is None else counters.fd,
        )
        fds = [start.listener_fd, control_messages_fd, *([] if counters is None else [counters.fd])]
        return ChildProcess(start, fds, ModelServerHandle, entry.environment)

    def _on_failure(self, error: Exception) -> None:
        if self._is_ready and self._stopping is None:
            self._on_death(error)

    async def _watch_heartbeats(self, process: ChildProcess) -> None:
        """Ends a process whose event loop hangs; that is a death like any other."""
        seconds = self._entry.settings.api_server_timeout
        monitor = HeartbeatMonitor(seconds, 1, time.monotonic())
        while (interval := monitor.poll_interval_ms) is not None:
            await asyncio.sleep(interval / 1e3)
            if monitor.find_silent([process.activity_table.since(0)], time.monotonic()):
                error = await run_in_thread(
                    lambda: process.unresponsive_error(seconds, "has given no sign of life")  # reads its stacks
                )
                process.fail(error)
                return

    # --- in a thread

    def _end_process(self, abort: bool) -> None:
        process, control = self._process, self._control
        if process is None:
            return
        if not self._is_ready:
            process.fail(EngineDeadError("The model was unloaded while it was loaded."), is_logged=True)
        elif process.failure is None and control is not None:
            process.expect_exits()
            control.send(ReceivedSignal(signal.SIGTERM))
            seconds = self._entry.settings.shutdown_timeout + _FINAL_RESPONSES_SECONDS
            if abort and not self._wait_exit(process, min(_ABORT_SECONDS, seconds)):
                control.send(ReceivedSignal(signal.SIGTERM))
            self._wait_exit(process, _FINAL_RESPONSES_SECONDS if abort else seconds)
        process.close()
        if control is not None:
            control.close()
        self._after_end()

    @staticmethod
    def _wait_exit(process: ChildProcess, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while process.exit_code is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_EXIT_POLL_SECONDS)
        return True


def engine_arguments(engine: EngineArgs) -> dict[str, Any]:
    """The arguments that differ from their defaults, as keywords of `EngineArgs.from_kwargs`."""
    values = {setting.name: (getattr(engine, setting.name), setting.default) for setting in EngineArgs.options()}
    return {name: value for name, (value, default) in values.items() if value != default}


def model_server_settings(entry: ModelEntry, internal_key: str) -> ServerSettings:
    """The settings of a model's API server. What browsers and other clients of the router need, the router does.

    Args:
        internal_key: An administrator's key, with which the router itself sends requests.
    """
    return dataclasses.replace(
        entry.settings,
        uds=None,
        served_model_names=(entry.name, *entry.aliases),
        router_key=internal_key,
        allowed_origins=(),
        allowed_hosts=(),
        access_log=False,
        docs=False,
    )


_thread_numbers = itertools.count()


async def run_in_thread(function: Callable[[], T]) -> T:
    """The result of a function that blocks, called in a thread of its own. A thread that hangs delays no exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = function()
        except BaseException as e:  # noqa: BLE001  (raised by the future)
            _call_in_loop(loop, resolve, None, e)
        else:
            _call_in_loop(loop, resolve, result, None)

    threading.Thread(target=run, name=f"model-{next(_thread_numbers)}", daemon=True).start()
    return await future


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function, *args)
