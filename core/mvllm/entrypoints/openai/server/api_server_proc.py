"""One of several API servers.

Started as `python -m mvllm.entrypoints.openai.server.api_server_proc <name> <control socket> <parent pid>`.

It listens at a socket that it shares with the others, and joins engine cores that their common parent has started.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict

import msgspec

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.metrics.shared_metrics_pages import SharedMetricsPages
from mvllm.engine.process.async_mp_client import AsyncMPClient
from mvllm.engine.process.coordinator_client import CoordinatorClient
from mvllm.engine.process.core_handshake import CoreHandshake
from mvllm.engine.process.dp_async_mp_client import DPLBAsyncMPClient
from mvllm.engine.process.joined_core_connection import JoinedCoreConnection
from mvllm.engine.process.launch import ChildProcess, CoreHandle, ProcessStartArgs
from mvllm.engine.process.message_socket import MessageSocket
from mvllm.engine.process.remote_exceptions import describe_process_failure
from mvllm.engine.process.zmq_channel import ChannelAddress
from mvllm.entrypoints.openai.server.api_server import APIServer, run_in_event_loop
from mvllm.entrypoints.openai.server.process_messages import (
    CoreHung,
    CoreStarted,
    EngineDied,
    ParentMessage,
    ShutdownSignal,
)
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.server.shared_metrics import SharedServerMetrics
from mvllm.entrypoints.openai.server.tokenizer_trial import TokenizerTrial
from mvllm.errors import EngineDeadError
from mvllm.executor.config_codec import decode_config
from mvllm.executor.process.activity_table import IDLE, ActivityTable
from mvllm.executor.process.child_startup import initialize_child
from mvllm.executor.process.handshake import send_message
from mvllm.executor.process.process_utils import exit_process


class EngineCoreAddress(msgspec.Struct, frozen=True):
    """How one engine core is joined.

    Attributes:
        channel: Where this server and the core meet.
        activity_fd: The core's status board.
    """

    channel: ChannelAddress
    activity_fd: int


class APIServerArgs(msgspec.Struct, frozen=True):
    """What an API server has of its own.

    Attributes:
        index: Which one it is, from 0.
        cores: By rank.
        control_messages_fd: The socket to its parent.
        coordinator_fd: The socket to the coordinator.
    """

    index: int
    cores: list[EngineCoreAddress]
    control_messages_fd: int
    coordinator_fd: int


class SharedServerArgs(msgspec.Struct, frozen=True):
    """What all API servers are told alike.

    Attributes:
        model: The model as it was asked for.
        config: The settled configuration, see config_codec.
        platform_summary: The platform's name and the plugin it came from.
        unresponsive_timeout: Seconds after which a core that has work and gives no sign of life is taken for hung.
        settings: The server's.
        listener_fd: Where it listens.
        shared_metrics_fd: The board with everybody's figures.
    """

    model: str
    config: bytes
    platform_summary: str
    unresponsive_timeout: float
    settings: ServerSettings
    listener_fd: int
    shared_metrics_fd: int


class APIServerStart(msgspec.Struct, frozen=True):
    """Everything an API server needs to know; the fields after `common` are as for a worker."""

    name: str
    server_args: APIServerArgs
    shared_args: SharedServerArgs
    activity_fd: int
    stack_fd: int
    sys_path: list[str]
    python_path: str | None
    log_level: str

    @property
    def rank(self) -> int:
        """Its line on the board."""
        return 0


class APIServerHandle(CoreHandle):
    """The process, as its parent sees it."""

    module = "mvllm.entrypoints.openai.server.api_server_proc"


class APIServerProcess(ChildProcess):
    """Starts an API server.

    Args:
        place, common: What it is told. All descriptors in them are inherited.
    """

    def __init__(self, place: APIServerArgs, common: SharedServerArgs) -> None:
        def make_start(own: ProcessStartArgs) -> APIServerStart:
            return APIServerStart(f"ApiServer_{place.index}", place, common, **asdict(own))

        fds = [place.control_messages_fd, place.coordinator_fd, common.listener_fd, common.shared_metrics_fd]
        super().__init__(make_start, [*fds, *(core.activity_fd for core in place.cores)], APIServerHandle)


class _ServerGroupMember:
    """This server's place among the processes: joins the cores, and does what the parent says."""

    def __init__(self, start: APIServerStart, control: socket.socket, board: ActivityTable) -> None:
        self._server_args, self._shared_args = place, common = start.server_args, start.shared_args
        self._control = control
        self._activity_table = board
        self._control_socket = MessageSocket(place.control_messages_fd)
        self._decoder: msgspec.msgpack.Decoder[ParentMessage] = msgspec.msgpack.Decoder(ParentMessage)
        self._coordinator_client = CoordinatorClient(MessageSocket(place.coordinator_fd), place.index + 1)
        self.shared_metrics = SharedServerMetrics(SharedMetricsPages(common.shared_metrics_fd), place.index)
        self._links = [
            JoinedCoreConnection(
                core.channel, core.activity_fd, common.unresponsive_timeout, self._hung_core_reporter(rank)
            )
            for rank, core in enumerate(place.cores)
        ]
        self.tokenizer_trial = TokenizerTrial() if place.index == 0 else None  # one for all
        self._cores_ready = threading.Event()
        self._failure: EngineDeadError | None = None
        self._on_signal: Callable[[int], None] = lambda number: None
        self._is_ready = False

    def load_engine(self) -> AsyncLLM:
        """The engine, as soon as its cores are ready."""
        config = decode_config(self._shared_args.config)
        if self.tokenizer_trial is not None:
            self.tokenizer_trial.start(config.model.tokenizer)
        self._activity_table.write(0, "loading the tokenizer")
        clients = [AsyncMPClient(config, link, self._shared_args.platform_summary) for link in self._links]
        engine = AsyncLLM(
            config,
            log_stats=self._server_args.index == 0,  # its line is about all of them
            client=DPLBAsyncMPClient(config, clients, self._coordinator_client),
            name=f"{self._server_args.index}-",
            elsewhere=self.shared_metrics.other_engine_metrics,
        )
        self._activity_table.write(0, "waiting for the engine cores")
        self._cores_ready.wait()
        if self._failure is not None:
            raise self._failure
        self._activity_table.write(0, "joining the engine cores")
        for client in clients:
            client.wait_ready()
        return engine

    def start_receiving(self, loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> None:
        """Does what the parent says, from now on."""
        self._on_signal = on_signal
        loop.add_reader(self._control_socket.fd, self._receive_messages)
        self._receive_messages()

    def report_ready(self) -> None:
        """Requests are answered from now on."""
        self._is_ready = True
        self.heartbeat()
        send_message(self._control, CoreHandshake())

    def heartbeat(self) -> None:
        """A sign of life for the parent, which looks for it as soon as requests are answered."""
        if self._is_ready:
            self._activity_table.write(0, IDLE)

    def _receive_messages(self) -> None:
        while (data := self._control_socket.receive()) is not None:
            match self._decoder.decode(data):
                case CoreStarted(rank=rank, ready=ready, pid=pid):
                    self._links[rank].mark_ready(ready, pid)
                    if all(link.is_ready for link in self._links):
                        self._cores_ready.set()
                case EngineDied(message=message):
                    self._failure = EngineDeadError(message)
                    for link in self._links:
                        link.set_failure(self._failure)
                    self._cores_ready.set()
                case ShutdownSignal(signal=number):
                    self._on_signal(number)

    def _hung_core_reporter(self, rank: int) -> Callable[[], None]:
        def report() -> None:
            self._control_socket.send(CoreHung(rank))

        return report


def serve(start: APIServerStart, control: socket.socket, board: ActivityTable) -> int:
    """Runs one API server; returns its exit status."""
    membership = _ServerGroupMember(start, control, board)
    listener = socket.socket(fileno=start.shared_args.listener_fd)
    common = start.shared_args
    server = APIServer(
        membership.load_engine, common.model, common.settings, listener, membership, membership.tokenizer_trial
    )
    return run_in_event_loop(server)


def main() -> None:
    """The program. Never returns."""
    start, control, board = initialize_child(APIServerStart)
    try:
        status = serve(start, control, board)
    except BaseException as e:  # noqa: BLE001  (travels to the parent)
        failure = describe_process_failure(e, name=start.name, activity=str(board.read(0)))
        send_message(control, CoreHandshake(failure=failure))
        exit_process(1)
    exit_process(status)


if __name__ == "__main__":
    main()
