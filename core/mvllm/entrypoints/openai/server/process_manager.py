"""Several API servers on one socket, the engine cores that they share, and a coordinator between them: starts them,
watches them, ends them.

    mvllm serve ─┬─ ApiServer_0 ─┐ ROUTER/PULL       DEALER/PUSH ┌─ EngineCore_DP0 ── its workers
                 ├─ ApiServer_1 ─┴──────── every one ────────────┴─ EngineCore_DP1 ── its workers
                 └─ DPCoordinator   told by cores what they have to do, tells API servers

This process answers no request: it waits in the kernel for a signal or for the end of one of the others, and looks now
and then whether API servers and coordinator still give signs of life; one that does not is ended. The first that dies
ends the server. Where an engine core or the coordinator has died, requests under way fail. Where an API server has, its
own requests are dropped, and the others finish theirs, as after SIGTERM; the exit status is 1 all the same.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator

import msgspec

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.engine.frontend.engine_frontend import check_config
from mvllm.engine.metrics.shared_metrics_pages import SharedMetricsPages
from mvllm.engine.metrics.startup_timer import StartupTimer
from mvllm.engine.process.async_core_client import resolve_server_config
from mvllm.engine.process.coordinator import CoordinatorChildProcess
from mvllm.engine.process.dp_async_mp_client import replica_configs, replica_name
from mvllm.engine.process.launch import ChildProcess, failing_together
from mvllm.engine.process.launched_core_connection import LaunchedCoreConnection, as_engine_dead_error
from mvllm.engine.process.message_socket import MessageSocket, message_socket_pair
from mvllm.engine.process.zmq_channel import new_addresses
from mvllm.entrypoints.openai.server.api_server import log_listening
from mvllm.entrypoints.openai.server.api_server_proc import (
    APIServerArgs,
    APIServerProcess,
    EngineCoreAddress,
    SharedServerArgs,
)
from mvllm.entrypoints.openai.server.heartbeat_monitor import HeartbeatMonitor
from mvllm.entrypoints.openai.server.listener import listener_url
from mvllm.entrypoints.openai.server.process_messages import CoreHung, CoreStarted, EngineDied, ShutdownSignal
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

_FINAL_RESPONSES_SECONDS = 15.0  # what an API server gets beyond the time for requests under way
_POLL_MS = 50  # at the end, for processes that have ended
_LONGEST_MESSAGE = 16 << 10


def run_multi_api_server(args: EngineArgs, settings: ServerSettings, listener: socket.socket, count: int) -> int:
    """Serves until told to end.

    Args:
        listener: Where; closed at the end.
        count: API servers.

    Returns:
        The exit status: 0 after an orderly end, 1 if a process died.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked.
    """
    log_listening(listener, settings)
    crew = _ProcessManager(args, settings, listener, count)
    try:
        crew.start()
        return crew.supervise()
    finally:
        force_exit_after(SHUTDOWN_SECONDS)
        crew.shutdown()


class _ProcessManager:
    """All processes of one server."""

    def __init__(self, args: EngineArgs, settings: ServerSettings, listener: socket.socket, count: int) -> None:
        self._settings = settings
        self._listener = listener
        self._model = args.model
        self._phases = StartupTimer()
        config = args.create_engine_config()
        check_config(config)
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
        self._status = 0
        self._deadline = float("inf")  # not at infinity once the server ends

    # --- its start

    def start(self) -> None:
        """Returns when requests are answered.

        Raises:
            Exception: What one of the processes could not be started for.
        """
        begun = time.monotonic()
        passed: list[socket.socket] = []

        def pair() -> tuple[socket.socket, int]:
            """Two ends: one for a child, which inherits its descriptor, and one to keep."""
            ours, theirs = message_socket_pair()
            passed.append(theirs)
            return ours, theirs.fileno()

        try:
            self._create_processes(pair, passed)
            for process in (*self._servers, *self._engine_cores, self._coordinator):
                if process is not None:
                    process.launch()
        finally:
            for end in passed:
                end.close()
        self._wait_ready()
        seconds = time.monotonic() - begun
        name = (*self._settings.served_model_names, self._model)[0]
        logger.info("Ready at %s after %.1f s, as model %s.", listener_url(self._listener), seconds, name)

    def _create_processes(self, pair: Callable[[], tuple[socket.socket, int]], passed: list[socket.socket]) -> None:
        def both() -> tuple[int, int]:
            """Two ends, each for a child."""
            one, other = pair()
            passed.append(one)
            return one.fileno(), other

        configs = replica_configs(self._config)
        meetings = [[new_addresses()[0] for _ in range(self._count)] for _ in configs]  # by rank, by server
        core_ends, server_ends = [both() for _ in configs], [both() for _ in range(self._count)]
        for rank, config in enumerate(configs):
            name = replica_name(self._config, rank)
            self._engine_cores.append(
                LaunchedCoreConnection(name, config, self._platform, meetings[rank], core_ends[rank][0])
            )
        common = SharedServerArgs(
            model=self._model,
            config=encode_config(self._config_per_server()),
            platform_summary=self._platform_summary,
            unresponsive_timeout=self._engine_cores[0].unresponsive_timeout,
            settings=self._settings,
            listener_fd=self._listener.fileno(),
            shared_metrics_fd=self._shared_metrics.fd,
        )
        for index in range(self._count):
            ours, theirs = pair()
            self._control_sockets.append(MessageSocket(ours))
            cores = [
                EngineCoreAddress(meeting[index], link.process.activity_table.fd)
                for meeting, link in zip(meetings, self._engine_cores)
            ]
            place = APIServerArgs(index, cores, control_messages_fd=theirs, coordinator_fd=server_ends[index][0])
            self._servers.append(APIServerProcess(place, common))
        self._coordinator = CoordinatorChildProcess([end for _, end in core_ends], [end for _, end in server_ends])

    def _config_per_server(self) -> EngineConfig:
        """What an API server is told: of a limit that it cannot know the others' part of, it has its share."""
        limit = self._config.scheduler.max_queued_tokens
        if not limit:
            return self._config
        return replace_field(self._config, "scheduler.max_queued_tokens", max(1, limit // self._count))

    def _wait_ready(self) -> None:
        assert self._coordinator is not None
        with failing_together([*self._servers, *(link.process for link in self._engine_cores), self._coordinator]):
            self._wait_for_each()

    def _wait_for_each(self) -> None:
        ready = [link.wait_ready() for link in self._engine_cores]
        cores = [msgspec.structs.replace(core, start_seconds=seconds) for core, seconds in ready]
        for server, door in zip(self._servers, self._control_sockets):
            for rank, (core, link) in enumerate(zip(cores, self._engine_cores)):
                while not door.send(CoreStarted(rank, core, link.pid)):  # there is no room before it begins to read
                    server.check()
                    time.sleep(_POLL_MS / 1e3)
        timeout = self._config.parallel.start_timeout
        assert self._coordinator is not None
        self._coordinator.wait_handshake(timeout)
        for server in self._servers:
            server.activity_table.write(0, "joining the engine cores")
            server.wait_handshake(timeout)
        self._phases.finish(
            {phase: max(core.start_seconds[phase] for core in cores) for phase in cores[0].start_seconds}
        )

    # --- its life

    def supervise(self) -> int:
        """Returns the exit status when all API servers have ended, for whatever reason."""
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
                signs = [process.activity_table.since(0) for process in self._heartbeat_processes]
                for index in heartbeats.find_silent(signs, time.monotonic()):
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
        """What is watched, and what is done when it becomes readable: returns whether that was its last news."""
        assert self._coordinator is not None
        watched: dict[int, Callable[[], bool]] = {}
        for link in self._engine_cores:
            watched[link.failure_fd] = lambda link=link: self._on_engine_death(link.process)  # type: ignore[misc]
        watched[self._coordinator.stop.fd] = lambda: self._on_engine_death(self._coordinator)
        for index, (server, door) in enumerate(zip(self._servers, self._control_sockets)):
            watched[server.stop.fd] = lambda index=index: self._on_server_death(index)  # type: ignore[misc]
            watched[door.fd] = lambda door=door: self._receive_report(door)  # type: ignore[misc]
        return watched

    @property
    def _heartbeat_processes(self) -> list[ChildProcess]:
        """The processes that give signs of life whether or not they have something to do."""
        assert self._coordinator is not None
        return [*self._servers, self._coordinator]

    def _terminate_silent(self, process: ChildProcess) -> None:
        """Ends a process that does nothing any more; its death is then noticed as any other."""
        if process.exit_code is not None or process.failure is not None:
            return
        error = process.unresponsive_error(self._settings.api_server_timeout, "has given no sign of life")
        if self._is_ending:  # its end is expected, and so no failure
            logger.error("%s", error)
            process.terminate()
        else:
            process.fail_with_root_cause(error)

    def _receive_report(self, door: MessageSocket) -> bool:
        data = door.receive()
        if data is not None:
            self._engine_cores[msgspec.msgpack.decode(data, type=CoreHung).rank].kill_unresponsive()
        return data is None

    # --- its end

    def _forward_signal(self, number: int) -> None:
        """A signal is for all API servers: they know best what they have under way."""
        if number == signal.SIGHUP and self._is_ending:  # a terminal that closes sends several
            return
        if not self._is_ending:
            name = signal.Signals(number).name
            logger.info("%s: no new requests; those under way have %g s.", name, self._settings.shutdown_timeout)
        self._drain_servers(number)

    def _drain_servers(self, number: int) -> None:
        self._begin_shutdown(self._settings.shutdown_timeout)
        for door in self._control_sockets:
            door.send(ShutdownSignal(number))

    def _begin_shutdown(self, seconds: float) -> None:
        """From now on, API servers are expected to end."""
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
        for door in self._control_sockets:
            door.send(EngineDied(message[:_LONGEST_MESSAGE]))
        return True

    def _on_server_death(self, index: int) -> bool:
        if self._servers[index].failure is None:
            return True
        self._status = 1
        logger.error("%s The others finish what they have under way.", self._servers[index].failure)
        for link in self._engine_cores:
            with contextlib.suppress(Exception):  # a core that is gone has dropped them
                link.send(DropClient(index + 1))
        if not self._is_ending:  # those that end already would take it for a second signal, and abort what they have
            self._drain_servers(signal.SIGTERM)
        return True

    def shutdown(self) -> None:
        """Nothing is left when this returns. Idempotent."""
        for server in self._servers:
            server.close()
        for link in self._engine_cores:
            link.shutdown()
        if self._coordinator is not None:
            self._coordinator.close()
        for door in self._control_sockets:
            door.close()
        self._shared_metrics.close()


@contextlib.contextmanager
def _signal_socket() -> Iterator[socket.socket]:
    """The signals that end a server, as bytes that can be read from a socket."""
    source, target = socket.socketpair()
    target.setblocking(False)

    def note(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # there is room for as many as anybody sends
            os.write(target.fileno(), bytes([number]))

    with source, target:
        for number in shutdown_signals():
            signal.signal(number, note)
        try:
            yield source
        finally:
            ignore_shutdown_signals()  # everything is being ended
