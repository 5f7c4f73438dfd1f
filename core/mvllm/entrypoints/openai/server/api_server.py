"""Runs one API server: HTTP while the engine is loaded, requests once it is ready, and an orderly shutdown.

    main thread    event loop: HTTP ─────────────────────────────────────────────> drain ─> end
    start thread   AsyncLLM (imports, weights) ─> engine
    child process  tokenizer trial ─────────────> result

While the model is being loaded, requests are refused with 503, `/health/live` is 200 and `/health/ready` 503. After the
first SIGTERM, SIGINT or SIGHUP running requests finish; a second signal aborts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, NoReturn, Protocol

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.requested_config import requested_config
from mvllm.engine.metrics.prometheus import EngineCollector
from mvllm.engine.metrics.tracing import Tracer
from mvllm.entrypoints import event_loop
from mvllm.entrypoints.chat_template import read_chat_template, read_special_tokens
from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.connections import ConnectionTable, RateLimitedWarning, default_max_connections
from mvllm.entrypoints.openai.server.heartbeat_monitor import HEARTBEAT_INTERVAL_SECONDS
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_protocol import LimitedHttpProtocol, uvicorn_settings
from mvllm.entrypoints.openai.server.listener import is_public, listener_url
from mvllm.entrypoints.openai.server.rate_limits import KeyCounters, RateLimiter
from mvllm.entrypoints.openai.server.server_state import ServerPhase, ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.server.shared_metrics import MetricsPublisher, ServerMetricsSnapshot, SharedServerMetrics
from mvllm.entrypoints.openai.server.stall_watchdog import StallWatchdog
from mvllm.entrypoints.openai.server.tokenizer_trial import TokenizerTrial
from mvllm.entrypoints.shutdown_signals import SHUTDOWN_SECONDS, exit_now, force_exit_after, shutdown_signals
from mvllm.errors import ConfigError
from mvllm.executor.process.process_utils import freeze_garbage_collection
from mvllm.logging import get_logger

logger = get_logger(__name__)

_POLL_SECONDS = 0.5
_FINAL_RESPONSES_SECONDS = 5.0
_ACCEPT_RETRY_SECONDS = 0.5
_MAX_ACCEPTS_PER_TURN = 16


class ServerParent(Protocol):
    """What an API server needs of the process that has started it.

    Attributes:
        index: Index of the server among those of its parent.
        shared_metrics: The metrics of all API servers of the engine.
        key_counters: The counters of rate limits of all API servers; None without limits.
    """

    index: int
    shared_metrics: SharedServerMetrics
    key_counters: KeyCounters | None

    def start_receiving(self, loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> None:
        """Handles the parent's messages in `loop`, and passes the signals that it received to `on_signal`."""

    def report_ready(self, engine: AsyncLLM) -> None:
        """Tells the parent that this server accepts requests for its engine."""

    def heartbeat(self) -> None:
        """Shows the parent that the event loop runs."""


def run_server(args: EngineArgs, settings: ServerSettings, listener: socket.socket) -> int:
    """Serves until a signal ends the server.

    Args:
        listener: The listening socket; closed at the end.

    Returns:
        The exit status: 0 after an orderly end, 1 if the engine died, 130 after Ctrl-C before it was loaded.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started with these arguments.
    """
    log_listening(listener, settings)
    trial = TokenizerTrial()
    load = _engine_loader(args, trial)
    return run_in_event_loop(APIServer(load, args.model, settings, listener, tokenizer_trial=trial))


def run_child_server(args: EngineArgs, settings: ServerSettings, listener: socket.socket, parent: ServerParent) -> int:
    """Serves in a child process of another server, on connections that the parent has accepted.

    Args:
        listener: Its `accept` returns the connections; closed at the end.
        parent: The connection to the parent, whose signals end the server.

    Returns, Raises:
        As `run_server`.
    """
    trial = TokenizerTrial()
    return run_in_event_loop(APIServer(_engine_loader(args, trial), args.model, settings, listener, parent, trial))


def _engine_loader(args: EngineArgs, trial: TokenizerTrial) -> Callable[[], AsyncLLM]:
    def load() -> AsyncLLM:
        config = requested_config(args)
        trial.start(config.model.tokenizer)
        return AsyncLLM(config)

    return load


def run_in_event_loop(server: APIServer) -> int:
    """Runs a server in an event loop of its own; returns the exit status."""
    return event_loop.run_in_event_loop(server.run())


def log_listening(listener: socket.socket, settings: ServerSettings) -> None:
    """Logs the server's URL, and warns if other machines can use it without a key."""
    logger.info("Listening at %s; loading the model.", listener_url(listener))
    warn_if_public(listener, settings)


def warn_if_public(listener: socket.socket, settings: ServerSettings) -> None:
    """Warns if other machines can use the server without a key."""
    if is_public(listener) and not settings.api_keys:
        logger.warning(
            "Other machines can use this server without a key: it listens beyond the loopback address, and no API key "
            "is set. Set one with --api-key-file, or listen on --host 127.0.0.1."
        )


class HTTPServer(uvicorn.Server):
    """uvicorn's server, without its signal handlers and with a limit on connections.

    Args:
        is_shared: Whether other processes accept connections from the same socket. If so, one connection is accepted
            per turn of the event loop, so that busy processes get fewer.
        heartbeat: Called every second.
    """

    def __init__(self, config: uvicorn.Config, *, is_shared: bool, heartbeat: Callable[[], None]) -> None:
        super().__init__(config)
        self._heartbeat = heartbeat
        self.server_state: ConnectionTable = ConnectionTable(default_max_connections())
        self._stop_event = asyncio.Event()
        self._max_accepts_per_turn = 1 if is_shared else _MAX_ACCEPTS_PER_TURN
        self._connecting: set[asyncio.Task[Any]] = set()
        self._failed_accept = RateLimitedWarning()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections, a few at a time: an event loop's own server accepts all that wait at once,
        before the limit can apply.
        """
        self.servers = []
        for listener in sockets or ():
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting connections, and waits for the open ones."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener.fileno())
        await super().shutdown(sockets)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(self._max_accepts_per_turn):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another process accepted it, or the client has left
            except OSError as e:  # no descriptors are free; waiting connections are accepted later
                self._failed_accept.log("No connection can be accepted: %s", e)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener.fileno())
                loop.call_later(_ACCEPT_RETRY_SECONDS, self._resume_accepting, listener)
                return
            self._start_connection(connection)

    def _start_connection(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _resume_accepting(self, listener: socket.socket) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _protocol(self) -> asyncio.Protocol:
        return LimitedHttpProtocol(self.config, self.server_state, self.lifespan.state)

    def stop(self) -> None:
        """Ends `serve` when the open connections are closed."""
        self.should_exit = True
        self._stop_event.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signals: APIServer does."""
        yield

    async def main_loop(self) -> None:
        """Updates the date in responses and sends heartbeats, until `stop` is called."""
        while not await self.on_tick(0):
            self._heartbeat()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_event.wait(), HEARTBEAT_INTERVAL_SECONDS)


class APIServer:
    """The HTTP server of one process.

    Args:
        load: Creates the engine; called in a thread.
        model: The model as the user named it.
        settings: The server's.
        listener: The listening socket; closed at the end.
        group: Connection to its parent, if the server is one of several or behind a router.
        tokenizer_trial: Started by `load`; the server waits for its result before it is ready.
    """

    def __init__(
        self,
        load: Callable[[], AsyncLLM],
        model: str,
        settings: ServerSettings,
        listener: socket.socket,
        group: ServerParent | None = None,
        tokenizer_trial: TokenizerTrial | None = None,
    ) -> None:
        self._make_engine = load
        self._tokenizer_trial = tokenizer_trial
        self._settings = settings
        self._listener = listener
        self._server_group = group
        self._models = OpenAIServingModels(settings.served_model_names or (model,), model)
        self._signals: list[int] = []
        self._signal_received = asyncio.Event()

    async def run(self) -> int:
        """Serves until a signal ends the server; returns the exit status."""
        settings, group = self._settings, self._server_group
        self._registry = registry = CollectorRegistry()
        publisher: MetricsPublisher | None = None
        if group is None:
            ProcessCollector(registry=registry)
            self._metrics = HTTPMetrics(registry)
        else:
            publisher = MetricsPublisher(group.shared_metrics, self._collect_metrics)
            self._metrics = HTTPMetrics(
                registry,
                other_servers=group.shared_metrics.other_http_metrics,
                on_change=publisher.schedule_publish,
            )
        self._state = ServerState(settings.heartbeat_timeout, publisher)
        endpoint = settings.otlp_traces_endpoint
        self._tracer = Tracer(endpoint, self._models.name) if endpoint is not None else None
        limiter: RateLimiter | None = None
        if (limits := settings.limits_by_key) is not None:
            counters, index = (None, 0) if group is None else (group.key_counters, group.index)
            behind_router = settings.router_key is not None
            limiter = RateLimiter(limits, settings.key_limits, counters, index, only_tokens=behind_router)
        app = build_app(self._state, self._models, self._metrics, settings, self._tracer, limiter, self._listener)
        config: dict[str, Any] = {"app": app, "timeout_graceful_shutdown": 2, **uvicorn_settings()}
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # clients cause them by sending invalid HTTP
        heartbeat = group.heartbeat if group is not None else lambda: None
        self._http = HTTPServer(uvicorn.Config(**config), is_shared=group is not None, heartbeat=heartbeat)
        loop = asyncio.get_running_loop()
        for number in shutdown_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        if group is not None:
            group.start_receiving(loop, self._on_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        engine: AsyncLLM | None = None
        self._chat_template_renderer = ChatTemplateRenderer()
        try:
            self._chat_template_renderer.start()
            engine = await self._load_engine()
            if engine is None:
                self._exit_before_loaded()
            status = await self._serve(engine)
        finally:
            force_exit_after(SHUTDOWN_SECONDS)
            if self._state.watchdog is not None:
                self._state.watchdog.close()
            self._http.stop()
            self._chat_template_renderer.close()
            if self._tokenizer_trial is not None:
                self._tokenizer_trial.close()
            await asyncio.wait([serving], timeout=_FINAL_RESPONSES_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state.close(), _FINAL_RESPONSES_SECONDS)
            if engine is not None:
                engine.shutdown()
            if self._tracer is not None:
                self._tracer.close()
        return status

    # --- start

    async def _load_engine(self) -> AsyncLLM | None:
        """The engine, or None if a signal came first. Raises as soon as the tokenizer trial fails."""
        loaded: Future[AsyncLLM] = Future()

        def load() -> None:
            with contextlib.suppress(InvalidStateError):  # cancelled below
                try:
                    loaded.set_result(self._make_engine())
                except BaseException as e:  # noqa: BLE001  (raised by the result)
                    loaded.set_exception(e)

        threading.Thread(target=load, name="engine-start", daemon=True).start()
        signalled = asyncio.create_task(self._signal_received.wait())
        waiting: set[asyncio.Future[Any]] = {asyncio.wrap_future(loaded)}
        if self._tokenizer_trial is not None:
            waiting.add(asyncio.wrap_future(self._tokenizer_trial.result))
        try:
            while waiting and not signalled.done():
                done, _ = await asyncio.wait({*waiting, signalled}, return_when=asyncio.FIRST_COMPLETED)
                for each in done - {signalled}:
                    each.result()
                waiting -= done
        except BaseException:
            if loaded.done() and loaded.exception() is None:
                loaded.result().shutdown()
            raise
        finally:
            for each in (signalled, *waiting):
                each.cancel()
        return None if waiting else loaded.result()

    def _exit_before_loaded(self) -> NoReturn:
        """Ends this process, and with it the thread that loads the engine and its child processes."""
        logger.info("Ended before the model was loaded.")
        exit_now(self._signals[0])

    # --- serving

    async def _serve(self, engine: AsyncLLM) -> int:
        settings, state = self._settings, self._state
        context = ServingContext.create(
            engine,
            self._chat_template_renderer,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
            chat_template=settings.chat_template,
            default_template_variables=settings.default_chat_template_kwargs,
            trust_request_chat_template=settings.trust_request_chat_template,
            force_include_usage=settings.force_include_usage,
        )
        self._registry.register(
            EngineCollector(engine, model_name=self._models.name, prefixes=settings.metrics_prefixes)
        )
        engine.tracer = self._tracer
        await self._models.load_lora_modules(engine, settings.lora_modules)
        await self._check_template(engine)
        freeze_garbage_collection()
        state.watchdog = StallWatchdog(asyncio.get_running_loop(), engine)
        state.set_ready(context)
        if self._server_group is None:
            seconds = time.monotonic() - state.started
            logger.info(
                "Ready at %s after %.1f s, as model %s.", listener_url(self._listener), seconds, self._models.name
            )
        else:
            await engine.check_health()  # from now on it reads the coordinator's messages, too
            state.publish_metrics()
            self._server_group.report_ready(engine)
        try:
            if await self._wait_for_end(engine):
                return await self._drain(engine)
            state.phase = ServerPhase.DEAD
            logger.error("The engine has stopped: %s", engine.dead_error)
            await self._wait_idle(_FINAL_RESPONSES_SECONDS)
            return 1
        finally:
            context.close()

    async def _check_template(self, engine: AsyncLLM) -> None:
        """Renders a short conversation with the chat template.

        Raises:
            ModelError: The template takes too much time or memory.
        """
        folder, given = Path(str(engine.model_config.tokenizer)), self._settings.chat_template
        template = given or read_chat_template(folder)
        if template is not None:
            source = "--chat-template" if given else str(folder)
            await self._chat_template_renderer.check(template, read_special_tokens(folder), source)

    def _collect_metrics(self) -> ServerMetricsSnapshot | None:
        engine = self._state.loaded_engine
        if engine is None:
            return None
        return ServerMetricsSnapshot(self._state.num_in_flight, self._metrics.snapshot(), engine.metrics.snapshot())

    async def _wait_for_end(self, engine: AsyncLLM) -> bool:
        """Waits for a signal or for the death of the engine; returns whether a signal came."""
        while not self._signals:
            if engine.errored:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signal_received.wait(), _POLL_SECONDS)
        return True

    # --- shutdown

    async def _drain(self, engine: AsyncLLM) -> int:
        state, timeout = self._state, self._settings.shutdown_timeout
        state.phase = ServerPhase.DRAINING
        logger.info(
            "%s: no new requests are accepted; %d running requests may take %g s.",
            signal.Signals(self._signals[0]).name,
            state.num_in_flight,
            timeout,
        )
        self._signal_received.clear()
        idle = asyncio.create_task(state.idle.wait())
        second_signal = asyncio.create_task(self._signal_received.wait())
        try:
            deadline = time.monotonic() + timeout
            while (
                not (idle.done() or second_signal.done() or engine.errored)
                and (left := deadline - time.monotonic()) > 0
            ):
                await asyncio.wait(
                    [idle, second_signal], timeout=min(left, _POLL_SECONDS), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            idle.cancel()
            second_signal.cancel()
        if engine.errored:
            state.phase = ServerPhase.DEAD
            return 1
        if state.num_in_flight:
            logger.info("Aborting %d requests.", state.num_in_flight)
            await engine.abort_all()
            await self._wait_idle(_FINAL_RESPONSES_SECONDS)
        logger.info("Ended.")
        return 0

    async def _wait_idle(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.idle.wait(), seconds)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self._signals:  # a terminal that closes sends several
            return
        self._signals.append(number)
        self._signal_received.set()


def require_tokenizer(args: EngineArgs) -> None:
    """Checks that the engine has a tokenizer, which the server needs.

    Raises:
        ConfigError: skip_tokenizer_init is set.
    """
    if args.skip_tokenizer_init:
        raise ConfigError("The server needs the model's tokenizer; leave skip_tokenizer_init unset.")
