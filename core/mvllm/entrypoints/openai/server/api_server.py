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
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.requested_config import requested_config
from mvllm.engine.metrics.prometheus import EngineCollector
from mvllm.engine.metrics.tracing import Tracer
from mvllm.entrypoints.chat_template import (
    check_chat_template,
    read_chat_template,
    read_special_tokens,
    template_file,
)
from mvllm.entrypoints.event_loop import run_in_event_loop
from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_server import FINAL_RESPONSES_SECONDS, RunningServer
from mvllm.entrypoints.openai.server.listener import is_public, listener_url
from mvllm.entrypoints.openai.server.rate_limits import KeyCounters, RateLimiter
from mvllm.entrypoints.openai.server.server_state import ServerPhase, ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.server.shared_metrics import MetricsPublisher, ServerMetricsSnapshot, SharedServerMetrics
from mvllm.entrypoints.openai.server.stall_watchdog import StallWatchdog
from mvllm.entrypoints.openai.server.tokenizer_trial import TokenizerTrial
from mvllm.entrypoints.shutdown_signals import SHUTDOWN_SECONDS, exit_now, force_exit_after
from mvllm.errors import ConfigError
from mvllm.executor.process.process_utils import freeze_garbage_collection
from mvllm.logging import get_logger

logger = get_logger(__name__)


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


def run_server(
    args: EngineArgs, settings: ServerSettings, listener: socket.socket, parent: ServerParent | None = None
) -> int:
    """Serves until a signal ends the server.

    Args:
        listener: The listening socket; closed at the end.
        parent: In a child process of another server, the connection to it, whose signals end this one. The listener's
            `accept` then returns connections that the parent has accepted.

    Returns:
        The exit status: 0 after an orderly end, 1 if the engine died, 130 after Ctrl-C before it was loaded.

    Raises:
        PlatformError, ConfigError, ModelError: The engine cannot be started with these arguments.
    """
    if parent is None:
        log_listening(listener, settings)
    trial = TokenizerTrial()

    def load() -> AsyncLLM:
        config = requested_config(args)
        trial.start(config.model.tokenizer)
        if settings.chat_template is None:
            check_chat_template(Path(str(config.model.tokenizer)), render=False)
        return AsyncLLM(config)

    return run_in_event_loop(APIServer(load, args.model, settings, listener, parent, trial).run())


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
        heartbeat = None if group is None else group.heartbeat
        self._server = RunningServer(app, self._listener, heartbeat=heartbeat)
        if group is not None:
            group.start_receiving(asyncio.get_running_loop(), self._server.on_signal)
        engine: AsyncLLM | None = None
        self._chat_template_renderer = ChatTemplateRenderer()
        try:
            self._chat_template_renderer.start()
            engine = await self._load_engine()
            if engine is None:  # exit_now ends the thread that loads it, too, and its child processes
                logger.info("Ended before the model was loaded.")
                exit_now(self._server.signals[0])
            status = await self._serve(engine)
        finally:
            force_exit_after(SHUTDOWN_SECONDS)
            if self._state.watchdog is not None:
                self._state.watchdog.close()
            self._chat_template_renderer.close()
            if self._tokenizer_trial is not None:
                self._tokenizer_trial.close()
            await self._server.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._state.close(), FINAL_RESPONSES_SECONDS)
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
        signalled = asyncio.create_task(self._server.wait_for_signal())
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
            if not await self._server.wait_for_signal(lambda: engine.errored):
                logger.error("The engine has stopped: %s", engine.dead_error)
            else:
                state.phase = ServerPhase.DRAINING
                timeout = settings.shutdown_timeout
                await self._server.drain(lambda: state.num_in_flight, timeout, lambda: engine.errored)
                if not engine.errored:
                    if state.num_in_flight:
                        await engine.abort_all()
                        await state.wait_idle(FINAL_RESPONSES_SECONDS)
                    logger.info("Ended.")
                    return 0
            state.phase = ServerPhase.DEAD
            await state.wait_idle(FINAL_RESPONSES_SECONDS)
            return 1
        finally:
            context.close()

    async def _check_template(self, engine: AsyncLLM) -> None:
        """Renders a short conversation with the chat template.

        Raises:
            ModelError: The template takes too much time or memory, or cannot work.
        """
        folder, given = Path(str(engine.model_config.tokenizer)), self._settings.chat_template
        template = given or read_chat_template(folder)
        if template is not None:
            source = "of --chat-template" if given else str(template_file(folder))
            await self._chat_template_renderer.check(template, read_special_tokens(folder), source)

    def _collect_metrics(self) -> ServerMetricsSnapshot | None:
        engine = self._state.loaded_engine
        if engine is None:
            return None
        return ServerMetricsSnapshot(self._state.num_in_flight, self._metrics.snapshot(), engine.metrics.snapshot())


def require_tokenizer(args: EngineArgs) -> None:
    """Checks that the engine has a tokenizer, which the server needs.

    Raises:
        ConfigError: skip_tokenizer_init is set.
    """
    if args.skip_tokenizer_init:
        raise ConfigError("The server needs the model's tokenizer; leave skip_tokenizer_init unset.")
