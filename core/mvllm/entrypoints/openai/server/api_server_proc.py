"""The process of one of several API servers. They share a listening socket and the engine cores.

Started by `child_program` with the arguments `<name> <control socket> <parent pid>`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.metrics.shared_metrics_pages import SharedMetricsPages
from mvllm.engine.process.async_mp_client import AsyncMPClient
from mvllm.engine.process.coordinator_client import CoordinatorClient
from mvllm.engine.process.core_handshake import CoreReady
from mvllm.engine.process.dp_async_mp_client import DPLBAsyncMPClient
from mvllm.engine.process.joined_core_connection import JoinedCoreConnection
from mvllm.engine.process.launch import ChildProcess, CoreHandle
from mvllm.engine.process.message_socket import MessageSocket
from mvllm.engine.process.zmq_channel import ChannelAddress
from mvllm.entrypoints.event_loop import run_in_event_loop
from mvllm.entrypoints.openai.server.api_server import APIServer
from mvllm.entrypoints.openai.server.rate_limits import KeyCounters
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.server.shared_metrics import SharedServerMetrics
from mvllm.entrypoints.openai.server.tokenizer_trial import TokenizerTrial
from mvllm.errors import EngineDeadError
from mvllm.executor.config_codec import decode_config
from mvllm.executor.process.activity_table import IDLE, ActivityTable
from mvllm.executor.process.child_startup import run_child
from mvllm.executor.process.handshake import ChildStartArgs, Handshake, send_message


class CoreStarted(msgspec.Struct, tag=1, frozen=True):
    """To an API server: an engine core is ready for requests.

    Attributes:
        rank: The core's data-parallel rank.
        ready: The core's handshake.
        pid: The core's process id.
    """

    rank: int
    ready: CoreReady
    pid: int


class EngineDied(msgspec.Struct, tag=2, frozen=True):
    """To an API server: the engine has stopped. Running requests fail, and the server ends."""

    message: str


class ShutdownSignal(msgspec.Struct, tag=3, frozen=True):
    """To an API server: a signal was received. After the first, running requests finish; the second aborts them."""

    signal: int


class CoreHung(msgspec.Struct, tag=4, frozen=True):
    """To the parent: an engine core with requests has been silent for too long."""

    rank: int


ParentMessage = CoreStarted | EngineDied | ShutdownSignal
"""Messages of the parent to an API server."""


class EngineCoreAddress(msgspec.Struct, frozen=True):
    """How an API server connects to one engine core.

    Attributes:
        channel: Addresses of the sockets between the server and the core.
        activity_fd: Descriptor of the core's activity table.
    """

    channel: ChannelAddress
    activity_fd: int


class APIServerStart(ChildStartArgs, frozen=True, kw_only=True):
    """The start arguments of an API server process.

    Attributes:
        index: Index of the server, from 0.
        cores: The engine cores, by rank.
        control_messages_fd: Descriptor of the socket to the parent.
        coordinator_fd: Descriptor of the socket to the coordinator.
        model: The model that the user named.
        config: The resolved configuration, encoded by config_codec.
        platform_summary: The platform's name and the plugin it came from.
        unresponsive_timeout: Seconds without updates after which a core with work is considered hung.
        settings: The settings of the server.
        listener_fd: Descriptor of the listening socket.
        shared_metrics_fd: Descriptor of the shared metrics pages.
        key_counters_fd: Descriptor of the counters of rate limits; None without limits.
    """

    index: int
    cores: list[EngineCoreAddress]
    control_messages_fd: int
    coordinator_fd: int
    model: str
    config: bytes
    platform_summary: str
    unresponsive_timeout: float
    settings: ServerSettings
    listener_fd: int
    shared_metrics_fd: int
    key_counters_fd: int | None


class APIServerProcessHandle(CoreHandle):
    """The parent's handle of an API server process."""

    module = "mvllm.entrypoints.openai.server.api_server_proc"


class APIServerProcess(ChildProcess):
    """An API server as a child process.

    Args:
        start: The start arguments. The process inherits all descriptors in them.
    """

    def __init__(self, start: APIServerStart) -> None:
        fds = [start.control_messages_fd, start.coordinator_fd, start.listener_fd, start.shared_metrics_fd]
        fds += [] if start.key_counters_fd is None else [start.key_counters_fd]
        super().__init__(start, [*fds, *(core.activity_fd for core in start.cores)], APIServerProcessHandle)


class ServerGroupMember:
    """Connects one API server to its parent, the engine cores, the coordinator and the shared metrics.

    Attributes:
        index: Index of this server.
        shared_metrics: The metrics of all API servers.
        key_counters: The counters of rate limits of all API servers; None without limits.
        tokenizer_trial: The trial of this server, if it runs one.
    """

    def __init__(self, start: APIServerStart, control: socket.socket, activity_table: ActivityTable) -> None:
        self._start = start
        self._control = control
        self._activity_table = activity_table
        self._control_socket = MessageSocket(start.control_messages_fd)
        self._decoder: msgspec.msgpack.Decoder[ParentMessage] = msgspec.msgpack.Decoder(ParentMessage)
        self._coordinator_client = CoordinatorClient(MessageSocket(start.coordinator_fd), start.index + 1)
        self.shared_metrics = SharedServerMetrics(SharedMetricsPages(start.shared_metrics_fd), start.index)
        self.index = start.index
        self.key_counters = None if start.key_counters_fd is None else KeyCounters(start.key_counters_fd)
        self._core_connections = [
            JoinedCoreConnection(
                core.channel, core.activity_fd, start.unresponsive_timeout, self._hung_core_reporter(rank)
            )
            for rank, core in enumerate(start.cores)
        ]
        self.tokenizer_trial = TokenizerTrial() if start.index == 0 else None
        self._cores_ready = threading.Event()
        self._failure: EngineDeadError | None = None
        self._is_ready = False

    def load_engine(self) -> AsyncLLM:
        """Creates the engine; returns when its cores are ready."""
        config = decode_config(self._start.config)
        if self.tokenizer_trial is not None:
            self.tokenizer_trial.start(config.model.tokenizer)
        self._activity_table.write(0, "loading the tokenizer")
        clients = [AsyncMPClient(config, each, self._start.platform_summary) for each in self._core_connections]
        if config.model.max_model_len_is_auto:  # the engine is made for the length that the cores have chosen
            self._join_cores(clients)
        engine = AsyncLLM(
            config,
            log_stats=self._start.index == 0,  # the log line has the totals of all servers
            client=DPLBAsyncMPClient(config, clients, self._coordinator_client),
            name=f"{self._start.index}-",
            other_metrics=self.shared_metrics.other_engine_metrics,
        )
        if not config.model.max_model_len_is_auto:
            self._join_cores(clients)
        return engine

    def _join_cores(self, clients: Sequence[AsyncMPClient]) -> None:
        """Waits until the cores have started, and connects the clients."""
        self._activity_table.write(0, "waiting for the engine cores")
        self._cores_ready.wait()
        if self._failure is not None:
            raise self._failure
        self._activity_table.write(0, "joining the engine cores")
        for client in clients:
            client.wait_ready()

    def start_receiving(self, loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> None:
        """Handles the parent's messages in `loop`, and passes the signals that it received to `on_signal`."""
        loop.add_reader(self._control_socket.fd, self._receive_messages, on_signal)
        self._receive_messages(on_signal)

    def report_ready(self, engine: AsyncLLM) -> None:
        """Tells the parent that this server accepts requests."""
        self._is_ready = True
        self.heartbeat()
        send_message(self._control, Handshake())

    def heartbeat(self) -> None:
        """Shows the parent that the event loop runs. The parent checks it once the server is ready."""
        if self._is_ready:
            self._activity_table.write(0, IDLE)

    def _receive_messages(self, on_signal: Callable[[int], None]) -> None:
        while (data := self._control_socket.receive()) is not None:
            match self._decoder.decode(data):
                case CoreStarted(rank=rank, ready=ready, pid=pid):
                    self._core_connections[rank].mark_ready(ready, pid)
                    if all(each.is_ready for each in self._core_connections):
                        self._cores_ready.set()
                case EngineDied(message=message):
                    self._failure = EngineDeadError(message)
                    for each in self._core_connections:
                        each.set_failure(self._failure)
                    self._cores_ready.set()
                case ShutdownSignal(signal=number):
                    on_signal(number)

    def _hung_core_reporter(self, rank: int) -> Callable[[], None]:
        def report() -> None:
            self._control_socket.send(CoreHung(rank))

        return report


def serve(start: APIServerStart, control: socket.socket, activity_table: ActivityTable) -> int:
    """Runs one API server; returns its exit status."""
    group = ServerGroupMember(start, control, activity_table)
    listener = socket.socket(fileno=start.listener_fd)
    server = APIServer(group.load_engine, start.model, start.settings, listener, group, group.tokenizer_trial)
    return run_in_event_loop(server.run())


def main() -> None:
    """The program. Never returns."""
    run_child(APIServerStart, serve)


if __name__ == "__main__":
    main()
