"""The process of one loaded model: an API server of its own, which serves the connections that the router sends it.

Started as `python -m mvllm_router.model_server_proc <name> <control socket> <parent pid>`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mvllm.extension_api.processes import (
    IDLE,
    ActivityTable,
    ChildStartArgs,
    CoreHandshake,
    MessageSocket,
    run_child,
    send_message,
)
from mvllm.extension_api.server import (
    AsyncLLM,
    EngineArgs,
    KeyCounters,
    ServerSettings,
    SharedServerMetrics,
    run_server,
)
from mvllm_router.connection_passing import ConnectionListener
from mvllm_router.model_entry import bytes_of_weights


class ModelServerStart(ChildStartArgs, frozen=True, kw_only=True):
    """The start arguments of a model server.

    Attributes:
        engine_args: The engine's arguments.
        settings: The settings of its API server.
        listener_fd: Descriptor of the socket that brings connections.
        control_messages_fd: Descriptor of the socket that brings ReceivedSignals.
        index: Its row of the counters of rate limits.
        key_counters_fd: Descriptor of these counters; None without limits.
    """

    engine_args: dict[str, Any]
    settings: ServerSettings
    listener_fd: int
    control_messages_fd: int
    index: int
    key_counters_fd: int | None = None


class ReceivedSignal(msgspec.Struct, frozen=True):
    """To a model server: a signal was received. After the first, running requests finish; the second aborts them."""

    signal: int


class ModelServerHandshake(CoreHandshake, frozen=True):
    """The answer of a model server: it accepts requests, or has failed.

    Attributes:
        num_bytes: The memory of weights and KV cache.
        max_model_len: Longest sequence, in tokens.
    """

    num_bytes: int = 0
    max_model_len: int | None = None


class RouterConnection:
    """Connects the API server of a model to the router, as a ServerParent."""

    def __init__(self, start: ModelServerStart, control: socket.socket, activity_table: ActivityTable) -> None:
        self._start = start
        self._control = control
        self._activity_table = activity_table
        self._control_socket = MessageSocket(start.control_messages_fd)
        self._is_ready = False
        self.index = start.index
        self.key_counters = None if start.key_counters_fd is None else KeyCounters(start.key_counters_fd)
        self.shared_metrics = SharedServerMetrics.of_one_server()

    def start_receiving(self, loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> None:
        """Passes the signals that the router sends to `on_signal`, in `loop`."""
        loop.add_reader(self._control_socket.fd, self._receive_messages, on_signal)
        self._receive_messages(on_signal)

    def report_ready(self, engine: AsyncLLM) -> None:
        """Tells the router that requests are accepted, and how much memory the model takes."""
        self._is_ready = True
        self.heartbeat()
        caches = engine.cache_summary.total_bytes * engine.num_workers
        num_bytes = _bytes_of_weights(engine) * engine.config.parallel.data_parallel_size + caches
        send_message(
            self._control,
            ModelServerHandshake(num_bytes=num_bytes, max_model_len=engine.model_config.max_model_len),
        )

    def heartbeat(self) -> None:
        """Shows the router that the event loop runs."""
        self._activity_table.write(0, IDLE if self._is_ready else "loading the model")

    def _receive_messages(self, on_signal: Callable[[int], None]) -> None:
        while (data := self._control_socket.receive()) is not None:
            on_signal(msgspec.msgpack.decode(data, type=ReceivedSignal).signal)


def _bytes_of_weights(engine: AsyncLLM) -> int:
    given = Path(engine.model_config.model)
    try:
        return bytes_of_weights(given if given.is_file() else engine.model_config.path)
    except OSError:
        return 0


def serve(start: ModelServerStart, control: socket.socket, activity_table: ActivityTable) -> int:
    """Runs the API server of one model; returns its exit status."""
    router = RouterConnection(start, control, activity_table)
    router.heartbeat()
    args = EngineArgs.from_kwargs(**start.engine_args)
    return run_server(args, start.settings, ConnectionListener(start.listener_fd), router)


def main() -> None:
    """The program. Never returns."""
    run_child(ModelServerStart, serve)


if __name__ == "__main__":
    main()
