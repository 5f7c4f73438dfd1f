"""Runs the server: HTTP from the first moment on, the engine as soon as it is loaded, and an orderly end.

    main thread    event loop: HTTP ─────────────────────────────────────────────> drain ─> end
    start thread   AsyncLLM (imports, weights) ─> handed over
    child process  tokenizer trial ─────────────> result

Requests that come while the model is being loaded are refused with 503; `/health/live` is true, `/health/ready` not
yet. The first SIGTERM, SIGINT or SIGHUP lets requests under way finish, the second does not.
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
from pathlib import Path
from typing import Any, NoReturn, Protocol

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.metrics.prometheus import EngineCollector
from mvllm.engine.metrics.tracing import Tracer
from mvllm.entrypoints.chat_template import read_template_files
from mvllm.entrypoints.openai.admin.lora_routes import load_static_loras
from mvllm.entrypoints.openai.chat.serving import ChatPromptRenderer
from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.connections import ConnectionTable, RateLimitedWarning, default_max_connections
from mvllm.entrypoints.openai.server.heartbeat_monitor import HEARTBEAT_INTERVAL_SECONDS
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_protocol import LimitedHttpProtocol, uvicorn_settings
from mvllm.entrypoints.openai.server.listener import is_public, listener_url
from mvllm.entrypoints.openai.server.server_state import ServerPhase, ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.server.shared_metrics import ServerMetricsSnapshot, SharedServerMetrics
from mvllm.entrypoints.openai.tokenizer_trial import TokenizerTrial
from mvllm.entrypoints.parsers.auto_detect import resolve_parsers
from mvllm.entrypoints.shutdown_signals import SHUTDOWN_SECONDS, exit_now, force_exit_after, shutdown_signals
from mvllm.errors import ConfigError
from mvllm.logging import get_logger

logger = get_logger(__name__)

_POLL_SECONDS = 0.5
_FINAL_RESPONSES_SECONDS = 5.0
_ACCEPT_AGAIN_SECONDS = 0.5
_MOST_ACCEPTED_AT_ONCE = 16


def run_server(args: EngineArgs, settings: ServerSettings, listener: socket.socket) -> int:
    """Serves until told to end.

    Args:
        listener: Where; closed at the end.

    Returns:
        The exit status: 0 after an orderly end, 1 if the engine died, 130 after Ctrl-C before it was loaded.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started as asked.
    """
    log_listening(listener, settings)
    trial = TokenizerTrial()

    def load() -> AsyncLLM:
        config = args.create_engine_config()
        trial.start(config.model.tokenizer)
        return AsyncLLM(config)

    return run_in_event_loop(APIServer(load, args.model, settings, listener, tokenizer_trial=trial))


def run_in_event_loop(server: APIServer) -> int:
    """Runs a server in an event loop of its own; returns the exit status."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server.run())


def log_listening(listener: socket.socket, settings: ServerSettings) -> None:
    """Says where the server is to be found, and warns where that is too easy."""
    logger.info("Listening at %s; loading the model.", listener_url(listener))
    if is_public(listener) and not settings.api_keys:
        logger.warning(
            "Everybody who reaches this machine can use this server: it listens beyond the machine and has no API "
            "key. Set one with --api-key-file, or listen at --host 127.0.0.1."
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # it has no builds for some systems
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _HTTPServer(uvicorn.Server):
    """uvicorn without its signals, and without its ten looks at the clock per second.

    Args:
        is_shared: Other processes accept connections from the same socket. Then one is accepted per turn of the loop,
            so that a process which has much to do gets fewer.
        beat: Called every second.
    """

    def __init__(self, config: uvicorn.Config, *, is_shared: bool, beat: Callable[[], None]) -> None:
        super().__init__(config)
        self._heartbeat = beat
        self.server_state: ConnectionTable = ConnectionTable(default_max_connections())
        self._stop_event = asyncio.Event()
        self._max_accepts_per_turn = 1 if is_shared else _MOST_ACCEPTED_AT_ONCE
        self._connecting: set[asyncio.Task[Any]] = set()
        self._failed_accept = RateLimitedWarning()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections: a few at a time, since event loops by themselves accept all that wait, and
        know only afterwards that there are too many.
        """
        self.servers = []
        for listener in sockets or ():
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more of them, and waits for those there are."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener.fileno())
        await super().shutdown(sockets)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(self._max_accepts_per_turn):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another process was quicker, or the client has left
            except OSError as e:  # no descriptors are left: those who wait are accepted when there are some again
                self._failed_accept.log("No connection can be accepted: %s", e)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener.fileno())
                loop.call_later(_ACCEPT_AGAIN_SECONDS, self._resume_accepting, listener)
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
        """Has it end when connections are done."""
        self.should_exit = True
        self._stop_event.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to whoever runs this."""
        yield

    async def main_loop(self) -> None:
        """Keeps the date in answers true, and gives signs of life, until told to end."""
        while not await self.on_tick(0):
            self._heartbeat()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_event.wait(), HEARTBEAT_INTERVAL_SECONDS)


class ServerGroup(Protocol):
    """The other processes, for a server that is one of several.

    Attributes:
        figures: What all of them have counted.
    """

    shared_metrics: SharedServerMetrics

    def start_receiving(self, loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> None:
        """Has news read in `loop`. Signals that the server as a whole was sent go to `on_signal`."""

    def report_ready(self) -> None:
        """This server answers requests."""

    def heartbeat(self) -> None:
        """The event loop turns."""


class APIServer:
    """One process' server.

    Args:
        load: Makes the engine; called in a thread of its own.
        model: The model as it was asked for.
        settings: What the server was told.
        listener: Where it listens; closed at the end.
        team: The other processes, if there are any.
        tokenizer_trial: Started by `load`; the server is ready after it.
    """

    def __init__(
        self,
        load: Callable[[], AsyncLLM],
        model: str,
        settings: ServerSettings,
        listener: socket.socket,
        team: ServerGroup | None = None,
        tokenizer_trial: TokenizerTrial | None = None,
    ) -> None:
        self._make_engine = load
        self._tokenizer_trial = tokenizer_trial
        self._settings = settings
        self._listener = listener
        self._server_group = team
        self._models = OpenAIServingModels(settings.served_model_names or (model,), model)
        self._signals: list[int] = []
        self._signal_received = asyncio.Event()

    async def run(self) -> int:
        """Serves until told to end; returns the exit status."""
        settings, team = self._settings, self._server_group
        self._registry = registry = CollectorRegistry()
        if team is None:
            ProcessCollector(registry=registry)
            self._state = ServerState(settings.heartbeat_timeout)
            self._metrics = HTTPMetrics(registry)
        else:
            self._state = ServerState(settings.heartbeat_timeout, team.shared_metrics)
            self._metrics = HTTPMetrics(
                registry, elsewhere=team.shared_metrics.other_http_metrics, changed=team.shared_metrics.schedule_publish
            )
        endpoint = settings.otlp_traces_endpoint
        self._tracer = Tracer(endpoint, self._models.name) if endpoint is not None else None
        app = build_app(self._state, self._models, self._metrics, settings, self._tracer)
        config: dict[str, Any] = {"app": app, "timeout_graceful_shutdown": 2, **uvicorn_settings()}
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # anybody can send what is no HTTP
        beat = team.heartbeat if team is not None else lambda: None
        self._http = _HTTPServer(uvicorn.Config(**config), is_shared=team is not None, beat=beat)
        loop = asyncio.get_running_loop()
        for number in shutdown_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        if team is not None:
            team.start_receiving(loop, self._on_signal)
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
            self._http.stop()
            self._chat_template_renderer.close()
            if self._tokenizer_trial is not None:
                self._tokenizer_trial.close()
            await asyncio.wait([serving], timeout=_FINAL_RESPONSES_SECONDS)
            if engine is not None:
                engine.shutdown()
            if self._tracer is not None:
                self._tracer.close()
        return status

    # --- its start

    async def _load_engine(self) -> AsyncLLM | None:
        """The engine, or None where a signal came first. Fails as soon as the trial of the tokenizer does."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[AsyncLLM] = loop.create_future()

        def load() -> None:
            outcome: AsyncLLM | BaseException
            try:
                outcome = self._make_engine()
            except BaseException as e:  # noqa: BLE001  (raised where it is waited for)
                outcome = e
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever wanted this
                loop.call_soon_threadsafe(tell, outcome)

        def tell(outcome: AsyncLLM | BaseException) -> None:
            if isinstance(outcome, BaseException):
                loaded.set_exception(outcome)
            else:
                loaded.set_result(outcome)

        threading.Thread(target=load, name="engine-start", daemon=True).start()
        signalled = asyncio.create_task(self._signal_received.wait())
        waiting: set[asyncio.Future[Any]] = {loaded}
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
            signalled.cancel()
        return None if waiting else loaded.result()

    def _exit_before_loaded(self) -> NoReturn:
        """Ends this process while its engine is being started: nothing can wait for that, and nothing survives it."""
        logger.info("Ended before the model was loaded.")
        exit_now(self._signals[0])

    # --- its life

    async def _serve(self, engine: AsyncLLM) -> int:
        settings, state = self._settings, self._state
        tokenizer_pool = TokenizerPool(
            engine.tokenizer, engine.model_config.max_model_len, self._chat_template_renderer
        )
        folder = Path(engine.model_config.tokenizer or "")
        parsers = resolve_parsers(settings.tool_call_parser, settings.reasoning_parser, settings.chat_template, folder)
        prompts = ChatPromptRenderer(
            engine,
            tokenizer_pool,
            chat_template=settings.chat_template,
            trust_request_chat_template=settings.trust_request_chat_template,
            tool_parser=parsers.tool,
            reasoning_parser=parsers.reasoning,
        )
        self._registry.register(
            EngineCollector(engine, model_name=self._models.name, prefixes=settings.metrics_prefixes)
        )
        engine.tracer = self._tracer
        await load_static_loras(engine, self._models, settings)
        await self._check_template(engine)
        state.set_ready(engine, tokenizer_pool, prompts)
        if self._server_group is None:
            seconds = time.monotonic() - state.started
            logger.info(
                "Ready at %s after %.1f s, as model %s.", listener_url(self._listener), seconds, self._models.name
            )
        else:
            await engine.check_health()  # which also has news of others read from now on
            self._start_sharing_metrics(engine, self._server_group)
            self._server_group.report_ready()
        try:
            if await self._wait_for_end(engine):
                return await self._drain(engine)
            state.phase = ServerPhase.DEAD
            logger.error("The engine has stopped: %s", engine.dead_error)
            await self._wait_idle(_FINAL_RESPONSES_SECONDS)
            return 1
        finally:
            tokenizer_pool.close()

    async def _check_template(self, engine: AsyncLLM) -> None:
        """Tries the chat template out.

        Raises:
            ModelError: It takes too much time or memory.
        """
        folder = str(engine.model_config.tokenizer)
        template, special_tokens = read_template_files(Path(folder))
        given = self._settings.chat_template
        if given is not None or template is not None:
            await self._chat_template_renderer.check(
                given or template or "", special_tokens, "--chat-template" if given else folder
            )

    def _start_sharing_metrics(self, engine: AsyncLLM, team: ServerGroup) -> None:
        def collect() -> ServerMetricsSnapshot:
            return ServerMetricsSnapshot(self._state.num_in_flight, self._metrics.snapshot(), engine.metrics.snapshot())

        team.shared_metrics.start(collect)

    async def _wait_for_end(self, engine: AsyncLLM) -> bool:
        """Waits for a signal, or for the engine's death; returns whether it was a signal."""
        while not self._signals:
            if engine.errored:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signal_received.wait(), _POLL_SECONDS)
        return True

    # --- its end

    async def _drain(self, engine: AsyncLLM) -> int:
        state, timeout = self._state, self._settings.shutdown_timeout
        state.phase = ServerPhase.DRAINING
        logger.info(
            "%s: no new requests; %d under way have %g s.",
            signal.Signals(self._signals[0]).name,
            state.num_in_flight,
            timeout,
        )
        self._signal_received.clear()
        idle = asyncio.create_task(state.idle.wait())
        again = asyncio.create_task(self._signal_received.wait())
        try:
            deadline = time.monotonic() + timeout
            while not (idle.done() or again.done() or engine.errored) and (left := deadline - time.monotonic()) > 0:
                await asyncio.wait([idle, again], timeout=min(left, _POLL_SECONDS), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            again.cancel()
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
    """Refuses an engine that could not read a text.

    Raises:
        ConfigError: It was asked for without a tokenizer.
    """
    if args.skip_tokenizer_init:
        raise ConfigError("The server needs the model's tokenizer; leave skip_tokenizer_init unset.")
