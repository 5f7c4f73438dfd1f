"""The process of one loaded model: an API server of its own, which serves the connections that the router sends it.

Started as `python -m mvllm.entrypoints.router.model_server_proc <name> <control socket> <parent pid>`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.requested_config import requested_config
from mvllm.engine.metrics.shared_metrics_pages import SharedMetricsPages
from mvllm.engine.process.core_handshake import CoreHandshake
from mvllm.engine.process.message_socket import MessageSocket
from mvllm.entrypoints.openai.common.serving_models import weights_size
from mvllm.entrypoints.openai.server.api_server import APIServer, run_in_event_loop
from mvllm.entrypoints.openai.server.process_messages import ShutdownSignal
from mvllm.entrypoints.openai.server.rate_limits import KeyCounters
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.server.shared_metrics import SharedServerMetrics
from mvllm.entrypoints.openai.server.tokenizer_trial import TokenizerTrial
from mvllm.entrypoints.router.connection_passing import ConnectionListener
from mvllm.executor.process.activity_table import IDLE, ActivityTable
from mvllm.executor.process.child_startup import run_child
from mvllm.executor.process.handshake import ChildStartArgs, send_message


class ModelServerStart(ChildStartArgs, frozen=True, kw_only=True):
    """The start arguments of a model server.

    Attributes:
        engine_args: The engine's arguments.
        settings: The settings of its API server.
        listener_fd: Descriptor of the socket that brings connections.
        control_messages_fd: Descriptor of the socket that brings ShutdownSignals.
        index: Its row of the counters of rate limits.
        key_counters_fd: Descriptor of these counters; None without limits.
    """

    engine_args: dict[str, Any]
    settings: ServerSettings
    listener_fd: int
    control_messages_fd: int
    index: int
    key_counters_fd: int | None = None


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
        self._on_signal: Callable[[int], None] = lambda number: None
        self._engine: AsyncLLM | None = None
        self._is_ready = False
        self.index = start.index
        self.key_counters = None if start.key_counters_fd is None else KeyCounters(start.key_counters_fd)
        self.shared_metrics = SharedServerMetrics(SharedMetricsPages.create(1), 0)
        self.tokenizer_trial = TokenizerTrial()

    def load_engine(self) -> AsyncLLM:
        """Creates the engine."""
        config = requested_config(EngineArgs.from_kwargs(**self._start.engine_args))
        self.tokenizer_trial.start(config.model.tokenizer)
        self._activity_table.write(0, "loading the model")
        self._engine = AsyncLLM(config)
        return self._engine

    def start_receiving(self, loop: Any, on_signal: Callable[[int], None]) -> None:
        """Passes the signals that the router sends to `on_signal`, in `loop`."""
        self._on_signal = on_signal
        loop.add_reader(self._control_socket.fd, self._receive_messages)
        self._receive_messages()

    def report_ready(self) -> None:
        """Tells the router that requests are accepted, and how much memory the model takes."""
        engine = self._engine
        assert engine is not None
        self._is_ready = True
        self.heartbeat()
        caches = engine.cache_summary.total_bytes * engine.num_workers
        num_bytes = weights_size(engine.model_config) * engine.config.parallel.data_parallel_size + caches
        send_message(
            self._control,
            ModelServerHandshake(num_bytes=num_bytes, max_model_len=engine.model_config.max_model_len),
        )

    def heartbeat(self) -> None:
        """Shows the router that the event loop runs."""
        self._activity_table.write(0, IDLE if self._is_ready else "loading the model")

    def _receive_messages(self) -> None:
        while (data := self._control_socket.receive()) is not None:
            self._on_signal(msgspec.msgpack.decode(data, type=ShutdownSignal).signal)


def serve(start: ModelServerStart, control: socket.socket, activity_table: ActivityTable) -> int:
    """Runs the API server of one model; returns its exit status."""
    router = RouterConnection(start, control, activity_table)
    listener = ConnectionListener(start.listener_fd)
    model = str(start.engine_args["model"])
    server = APIServer(router.load_engine, model, start.settings, listener, router, router.tokenizer_trial)
    return run_in_event_loop(server)


def main() -> None:
    """The program. Never returns."""
    run_child(ModelServerStart, serve)


if __name__ == "__main__":
    main()
