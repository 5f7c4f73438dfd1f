"""Starts, supervises and ends several API servers, the engine cores that they share, and a coordinator.

    mvllm serve ─┬─ ApiServer_0 ─┐ ROUTER/PULL       DEALER/PUSH ┌─ EngineCore_DP0 ── its workers
                 ├─ ApiServer_1 ─┴──────── every one ────────────┴─ EngineCore_DP1 ── its workers
                 └─ DPCoordinator   forwards the load of each core to the API servers

This process answers no requests. It waits for a signal or for the death of a process, checks the heartbeats of the API
servers and of the coordinator, and kills a process that has stopped sending them.

    death of an engine core or the coordinator    running requests fail, and the server ends with exit status 1
    death of an API server                        its requests are aborted, the other servers finish theirs as after
                                                  SIGTERM, and the server ends with exit status 1
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.engine.frontend.engine_frontend import check_config
from mvllm.engine.frontend.requested_config import requested_config
from mvllm.engine.metrics.shared_metrics_pages import SharedMetricsPages
from mvllm.engine.metrics.startup_timer import StartupTimer
from mvllm.engine.process.async_core_client import resolve_server_config
from mvllm.engine.process.coordinator import CoordinatorChildProcess
from mvllm.engine.process.dp_async_mp_client import replica_configs, replica_name
from mvllm.engine.process.launch import ChildProcess, failing_together
from mvllm.engine.process.launched_core_connection import LaunchedCoreConnection, as_engine_dead_error
from mvllm.engine.process.message_socket import MessageSocket, message_socket_pair
from mvllm.engine.process.zmq_channel import new_address
from mvllm.entrypoints.chat_template import check_chat_template
from mvllm.entrypoints.openai.server.api_server import log_listening
from mvllm.entrypoints.openai.server.api_server_proc import (
    APIServerProcess,
    APIServerStart,
    CoreHung,
    CoreStarted,
    EngineCoreAddress,
    EngineDied,
    ShutdownSignal,
)
from mvllm.entrypoints.openai.server.heartbeat_monitor import HeartbeatMonitor
from mvllm.entrypoints.openai.server.listener import listener_url
from mvllm.entrypoints.openai.server.rate_limits import KeyCounters, RateLimiter
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.shutdown_signals import (
    SHUTDOWN_SECONDS,
    force_exit_after,
    ignore_shutdown_signals,
    shutdown_signals,
)
from mvllm.executor.config_codec import encode_config
from mvllm.logging import get_logger
from mvllm.messages.core_protocol import DropClient
from mvllm.platform.choose import choose_platform

logger = get_logger(__name__)

_FINAL_RESPONSES_SECONDS = 15.0  # for an API server to end, after the time for running requests
_POLL_MS = 50  # during the shutdown
_MAX_MESSAGE_LENGTH = 16 << 10


def run_multi_api_server(args: EngineArgs, settings: ServerSettings, listener: socket.socket, count: int) -> int:
    """Serves until a signal ends the server.

    Args:
        listener: The listening socket; closed at the end.
        count: Number of API servers.

    Returns:
        The exit status: 0 after an orderly end, 1 if a process died.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started with these arguments.
    """
    log_listening(listener, settings)
    manager = _ProcessManager(args, settings, listener, count)
    try:
        manager.start()
        return manager.supervise()
    finally:
        force_exit_after(SHUTDOWN_SECONDS)
        manager.shutdown()


class _ProcessManager:
    """All processes of one server."""

    def __init__(self, args: EngineArgs, settings: ServerSettings, listener: socket.socket, count: int) -> None:
        self._settings = settings
        self._listener = listener
        self._model = args.model
        self._phases = StartupTimer()
        config = requested_config(args)
        check_config(config)
        if settings.chat_template is None:
            check_chat_template(Path(str(config.model.tokenizer)), render=False)
        with self._phases.phase("platform"):
            chosen = choose_platform(config.platform)
        logger.info("Platform %s: %s.", chosen, chosen.reason)
        self._config = resolve_server_config(config, chosen)
        self._platform, self._platform_summary = chosen.source.name, str(chosen)
        self._count = count
        self._engine_cores: list[LaunchedCoreConnection] = []
        self._servers: list[APIServerProcess] = []
        self._control_sockets: list[MessageSocket] = []
        self._coordinator: CoordinatorChildProcess | None = None
        self._shared_metrics = SharedMetricsPages.create(count)
        limits = settings.limits_by_key
        self._key_counters = None if limits is None else KeyCounters.create(count, RateLimiter.num_keys(limits))
        self._status = 0
        self._deadline = float("inf")  # finite once the shutdown has begun

    # --- start

    def start(self) -> None:
        """Starts all processes; returns when the server accepts requests.

        Raises:
            Exception: The failure of a process that could not be started.
        """
        started = time.monotonic()
        inherited: list[socket.socket] = []

        def pair() -> tuple[socket.socket, int]:
            """A socket of this process, and the descriptor of its peer for a child."""
            ours, theirs = message_socket_pair()
            inherited.append(theirs)
            return ours, theirs.fileno()

        try:
            self._create_processes(pair, inherited)
            for process in (*self._servers, *self._engine_cores, self._coordinator):
                if process is not None:
                    process.launch()
        finally:
            for peer in inherited:
                peer.close()
        self._wait_ready()
        seconds = time.monotonic() - started
        name = (*self._settings.served_model_names, self._model)[0]
        logger.info("Ready at %s after %.1f s, as model %s.", listener_url(self._listener), seconds, name)

    def _create_processes(self, pair: Callable[[], tuple[socket.socket, int]], inherited: list[socket.socket]) -> None:
        def child_pair() -> tuple[int, int]:
            """The two descriptors of a socket pair between two children."""
            one, other = pair()
            inherited.append(one)
            return one.fileno(), other

        configs = replica_configs(self._config)
        addresses = [[new_address() for _ in range(self._count)] for _ in configs]  # by rank, by server
        core_fds, server_fds = [child_pair() for _ in configs], [child_pair() for _ in range(self._count)]
        for rank, replica in enumerate(configs):
            name = replica_name(self._config, rank)
            self._engine_cores.append(
                LaunchedCoreConnection(name, replica, self._platform, addresses[rank], core_fds[rank][0])
            )
        config = encode_config(self._config_per_server())
        for index in range(self._count):
            ours, theirs = pair()
            self._control_sockets.append(MessageSocket(ours))
            start = APIServerStart(
                name=f"ApiServer_{index}",
                index=index,
                cores=[
                    EngineCoreAddress(of_core[index], core.process.activity_table.fd)
                    for of_core, core in zip(addresses, self._engine_cores)
                ],
                control_messages_fd=theirs,
                coordinator_fd=server_fds[index][0],
                model=self._model,
                config=config,
                platform_summary=self._platform_summary,
                unresponsive_timeout=self._engine_cores[0].unresponsive_timeout,
                settings=self._settings,
                listener_fd=self._listener.fileno(),
                shared_metrics_fd=self._shared_metrics.fd,
                key_counters_fd=None if self._key_counters is None else self._key_counters.fd,
            )
            self._servers.append(APIServerProcess(start))
        self._coordinator = CoordinatorChildProcess([fd for _, fd in core_fds], [fd for _, fd in server_fds])

    def _config_per_server(self) -> EngineConfig:
        """The config of one API server: it enforces its share of `max_queued_tokens`."""
        limit = self._config.scheduler.max_queued_tokens
        if not limit:
            return self._config
        return replace_field(self._config, "scheduler.max_queued_tokens", max(1, limit // self._count))

    def _wait_ready(self) -> None:
        assert self._coordinator is not None
        with failing_together([*self._servers, *(core.process for core in self._engine_cores), self._coordinator]):
            self._wait_for_each(self._coordinator)

    def _wait_for_each(self, coordinator: CoordinatorChildProcess) -> None:
        handshakes = [core.wait_ready() for core in self._engine_cores]
        ready = [msgspec.structs.replace(handshake, start_seconds=seconds) for handshake, seconds in handshakes]
        for server, control in zip(self._servers, self._control_sockets):
            for rank, core in enumerate(self._engine_cores):
                while not control.send(CoreStarted(rank, ready[rank], core.pid)):  # full until the server reads
                    server.check()
                    time.sleep(_POLL_MS / 1e3)
        timeout = self._config.parallel.start_timeout
        coordinator.wait_handshake(timeout)
        for server in self._servers:
            server.activity_table.write(0, "joining the engine cores")
            server.wait_handshake(timeout)
        self._phases.finish(
            {phase: max(core.start_seconds[phase] for core in ready) for phase in ready[0].start_seconds}
        )

    # --- supervision

    def supervise(self) -> int:
        """Waits until all API servers have ended; returns the exit status."""
        with _signal_socket() as signals:
            poll = select.poll()
            watched = self._watched_descriptors()
            for fd in (signals.fileno(), *watched):
                poll.register(fd, select.POLLIN)
            heartbeats = HeartbeatMonitor(
                self._settings.api_server_timeout, len(self._heartbeat_processes), time.monotonic()
            )
            while self._has_running_servers():
                for fd, _ in poll.poll(_POLL_MS if self._is_ending else heartbeats.poll_interval_ms):
                    if fd == signals.fileno():
                        for number in signals.recv(64):
                            self._forward_signal(number)
                    elif watched[fd]():
                        poll.unregister(fd)
                last = [process.activity_table.since(0) for process in self._heartbeat_processes]
                for index in heartbeats.find_silent(last, time.monotonic()):
                    self._terminate_silent(self._heartbeat_processes[index])
        return self._status or int(any(server.exit_code != 0 for server in self._servers))

    @property
    def _is_ending(self) -> bool:
        return self._deadline != float("inf")

    def _has_running_servers(self) -> bool:
        if not self._is_ending:
            return True
        return time.monotonic() < self._deadline and any(server.exit_code is None for server in self._servers)

    def _watched_descriptors(self) -> dict[int, Callable[[], bool]]:
        """Descriptors to poll, with what to do when they are readable. It returns whether to stop polling them."""
        assert self._coordinator is not None
        watched: dict[int, Callable[[], bool]] = {}
        for core in self._engine_cores:
            watched[core.failure_fd] = lambda core=core: self._on_engine_death(core.process)  # type: ignore[misc]
        watched[self._coordinator.stop.fd] = lambda: self._on_engine_death(self._coordinator)
        for index, (server, control) in enumerate(zip(self._servers, self._control_sockets)):
            watched[server.stop.fd] = lambda index=index: self._on_server_death(index)  # type: ignore[misc]
            watched[control.fd] = lambda control=control: self._receive_report(control)  # type: ignore[misc]
        return watched

    @property
    def _heartbeat_processes(self) -> list[ChildProcess]:
        """The processes that send heartbeats even without requests."""
        assert self._coordinator is not None
        return [*self._servers, self._coordinator]

    def _terminate_silent(self, process: ChildProcess) -> None:
        """Kills a process without heartbeats; its death is then handled like any other."""
        if process.exit_code is not None or process.failure is not None:
            return
        error = process.unresponsive_error(self._settings.api_server_timeout, "has given no sign of life")
        if self._is_ending:  # its death is expected, so it is not a failure
            logger.error("%s", error)
            process.terminate()
        else:
            process.fail_with_root_cause(error)

    def _receive_report(self, control: MessageSocket) -> bool:
        data = control.receive()
        if data is not None:
            self._engine_cores[msgspec.msgpack.decode(data, type=CoreHung).rank].kill_unresponsive()
        return data is None

    # --- shutdown

    def _forward_signal(self, number: int) -> None:
        """Sends a signal to all API servers, which end when their requests have."""
        if number == signal.SIGHUP and self._is_ending:  # a terminal that closes sends several
            return
        if not self._is_ending:
            name = signal.Signals(number).name
            logger.info(
                "%s: no new requests are accepted; running requests may take %g s.",
                name,
                self._settings.shutdown_timeout,
            )
        self._drain_servers(number)

    def _drain_servers(self, number: int) -> None:
        self._begin_shutdown(self._settings.shutdown_timeout)
        for control in self._control_sockets:
            control.send(ShutdownSignal(number))

    def _begin_shutdown(self, seconds: float) -> None:
        """Expects the API servers to end within `seconds` and the time for final responses."""
        for server in self._servers:
            server.expect_exits()
        self._deadline = min(self._deadline, time.monotonic() + seconds + _FINAL_RESPONSES_SECONDS)

    def _on_engine_death(self, process: ChildProcess | None) -> bool:
        assert process is not None
        error = as_engine_dead_error(process.failure) if process.failure is not None else None
        message = str(error or "The engine has been shut down.")
        logger.error("The engine has stopped: %s", message)
        self._status = 1
        self._begin_shutdown(0.0)
        for control in self._control_sockets:
            control.send(EngineDied(message[:_MAX_MESSAGE_LENGTH]))
        return True

    def _on_server_death(self, index: int) -> bool:
        if self._servers[index].failure is None:
            return True
        self._status = 1
        logger.error("%s The other API servers finish their requests.", self._servers[index].failure)
        for core in self._engine_cores:
            with contextlib.suppress(Exception):  # a core that has died has no requests
                core.send(DropClient(index + 1))
        if not self._is_ending:  # servers that are ending would abort their requests at a second signal
            self._drain_servers(signal.SIGTERM)
        return True

    def shutdown(self) -> None:
        """Ends all processes and waits for them. Idempotent."""
        for server in self._servers:
            server.close()
        for core in self._engine_cores:
            core.shutdown()
        if self._coordinator is not None:
            self._coordinator.close()
        for control in self._control_sockets:
            control.close()
        self._shared_metrics.close()
        if self._key_counters is not None:
            self._key_counters.close()


@contextlib.contextmanager
def _signal_socket() -> Iterator[socket.socket]:
    """A socket from which the numbers of shutdown signals can be read, a byte each."""
    source, target = socket.socketpair()
    target.setblocking(False)

    def on_signal(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # the buffer holds more signals than users send
            os.write(target.fileno(), bytes([number]))

    with source, target:
        for number in shutdown_signals():
            signal.signal(number, on_signal)
        try:
            yield source
        finally:
            ignore_shutdown_signals()  # the shutdown has begun
