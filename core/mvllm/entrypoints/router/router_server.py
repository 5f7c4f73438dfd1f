"""Runs the router: one HTTP server in front of model servers, each a process with its own engine.

    mvllm serve --models FILE ── HTTP ──┬─ Model_small ── EngineCore ── its workers      loaded by the first request
                                        └─ Model_large ── EngineCore ── its workers      unloaded when not used

After the first SIGTERM, SIGINT or SIGHUP running requests finish; a second signal aborts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector

from mvllm.entrypoints.event_loop import run_in_event_loop
from mvllm.entrypoints.openai.common.request_body import BodyReader
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.server.api_server import HTTPServer, warn_if_public
from mvllm.entrypoints.openai.server.app import add_middleware, build_fastapi_app
from mvllm.entrypoints.openai.server.browser_requests import BrowserCheck
from mvllm.entrypoints.openai.server.connections import ConnectionTable, default_max_connections
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_protocol import uvicorn_settings
from mvllm.entrypoints.openai.server.listener import listener_url
from mvllm.entrypoints.openai.server.rate_limits import KeyCounters, RateLimiter
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.root_plugins import hold_plugins, loaded_plugins
from mvllm.entrypoints.router.model_catalog import ModelCatalog
from mvllm.entrypoints.router.model_entry import ModelEntry, weight_bytes
from mvllm.entrypoints.router.model_pool import ModelPool
from mvllm.entrypoints.router.model_server import ModelServerProcess, run_in_thread
from mvllm.entrypoints.router.pool_metrics import PoolCollector
from mvllm.entrypoints.router.pooled_model import ModelState, PooledModel, PoolLimits
from mvllm.entrypoints.router.router_app import RouterApp
from mvllm.entrypoints.router.router_routes import ModelRoutes
from mvllm.entrypoints.shutdown_signals import SHUTDOWN_SECONDS, force_exit_after, shutdown_signals
from mvllm.logging import get_logger

logger = get_logger(__name__)

MAX_MODELS = 1024
_POLL_SECONDS = 0.1
_FINAL_RESPONSES_SECONDS = 5.0


@dataclass(frozen=True)
class RouterConfig:
    """What the router serves.

    Attributes:
        entries: The models.
        limits: The limits of all models together.
        settings: The settings of the HTTP server.
        scan: Returns the models in the folder of models; None if there is none.
    """

    entries: Sequence[ModelEntry]
    limits: PoolLimits
    settings: ServerSettings
    scan: Callable[[], Iterable[ModelEntry]] | None = None


def run_router(config: RouterConfig, listener: socket.socket) -> int:
    """Serves until a signal ends the router; returns the exit status, 0.

    Args:
        listener: The listening socket; closed at the end.
    """
    logger.info("Listening at %s; models that are loaded on demand: %d.", listener_url(listener), len(config.entries))
    warn_if_public(listener, config.settings)
    settings = config.settings
    with hold_plugins(settings):
        return run_in_event_loop(RouterServer(config, listener).run())


class RouterServer:
    """The HTTP server and the models.

    Args:
        config: What to serve.
        listener: The listening socket; closed at the end.
    """

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._signals: list[int] = []
        self._signal_received = asyncio.Event()
        settings, limits = config.settings, config.settings.limits_by_key
        self._key_counters: KeyCounters | None = None
        self._rate_limiter: RateLimiter | None = None
        if limits is not None:  # those of the models, and the router's own
            self._key_counters = KeyCounters.create(MAX_MODELS + 1, RateLimiter.num_keys(limits))
            self._rate_limiter = RateLimiter(limits, settings.key_limits, self._key_counters, MAX_MODELS)
        self._indices: dict[str, int] = {}

    async def run(self) -> int:
        """Serves until a signal ends the router; returns the exit status."""
        settings = self._config.settings
        pool = self._pool = ModelPool(self._config.limits, self._make_server)
        models = [entry.engine.model for entry in self._config.entries]
        sizes = await run_in_thread(lambda: weight_bytes(models)) if self._config.limits.max_loaded_bytes else {}
        for entry in self._config.entries:
            pool.add(PooledModel(entry, sizes.get(entry.engine.model, 0)))
        catalog = ModelCatalog(pool, self._config.scan)
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        metrics = HTTPMetrics(registry)
        registry.register(PoolCollector(lambda: list(pool.models.items()), pool.metrics))
        reader = BodyReader.from_settings(settings)
        routes = ModelRoutes(pool, catalog, reader, metrics.exposition, lambda: self._phase)
        state = ServerState(settings.heartbeat_timeout)
        fallback = _fallback_app(settings, routes, state)
        self._app = RouterApp(pool, catalog, settings, fallback, routes.table())
        check = BrowserCheck.create(settings, self._listener)
        app = add_middleware(self._app, metrics, settings, self._rate_limiter, check)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # clients cause them by sending invalid HTTP
        config = uvicorn.Config(app=app, timeout_graceful_shutdown=2, **uvicorn_settings())
        http = HTTPServer(config, is_shared=False, heartbeat=lambda: None)
        http.server_state = ConnectionTable(default_max_connections() // 2)  # each has one to a model server, too
        loop = asyncio.get_running_loop()
        for number in shutdown_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        started = time.monotonic()
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        try:
            pool.start()
            ready = asyncio.create_task(self._log_ready(started))
            await self._signal_received.wait()
            ready.cancel()
            await self._drain()
        finally:
            force_exit_after(SHUTDOWN_SECONDS + settings.shutdown_timeout)
            await pool.close(abort=True)
            http.stop()
            await asyncio.wait([serving], timeout=_FINAL_RESPONSES_SECONDS)
            await state.close()
            if self._key_counters is not None:
                self._key_counters.close()
        logger.info("Ended.")
        return 0

    @property
    def _phase(self) -> str:
        return "draining" if self._app.is_draining else "ready"

    def _make_server(self, entry: ModelEntry, on_death: Callable[[Exception], None]) -> ModelServerProcess:
        index = self._indices.setdefault(entry.name, len(self._indices))
        return ModelServerProcess(entry, index, self._key_counters, on_death, lambda: self._tell_plugins_of_end(entry))

    def _tell_plugins_of_end(self, entry: ModelEntry) -> None:
        """Tells plugins that the process of a model has ended, for example so that its stored responses do."""
        settings = self._config.settings
        adapters = (*(name for name, _ in entry.settings.lora_modules), *self._pool.models[entry.name].adapters)
        for _, plugin in loaded_plugins(settings.disabled_http_plugins):
            plugin.model_ended(settings, (*entry.names, *adapters))

    async def _log_ready(self, started: float) -> None:
        """Logs that the pinned models are loaded, if there are any."""
        pinned = [model for model in self._pool.models.values() if model.entry.is_pinned]
        while any(model.state is not ModelState.LOADED for model in pinned):
            await asyncio.sleep(_POLL_SECONDS)
        logger.info(
            "Ready at %s after %.1f s; models: %s.",
            listener_url(self._listener),
            time.monotonic() - started,
            ", ".join(self._pool.models),
        )

    async def _drain(self) -> None:
        timeout = self._config.settings.shutdown_timeout
        self._app.is_draining = True
        self._pool.stop_keeping()
        logger.info(
            "%s: no new requests are accepted; %d running requests may take %g s.",
            signal.Signals(self._signals[0]).name,
            self._pool.num_requests,
            timeout,
        )
        self._signal_received.clear()
        deadline = time.monotonic() + timeout
        while self._pool.num_requests and time.monotonic() < deadline and not self._signal_received.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signal_received.wait(), _POLL_SECONDS)
        if self._pool.num_requests:
            logger.info("Aborting %d requests.", self._pool.num_requests)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self._signals:  # a terminal that closes sends several
            return
        self._signals.append(number)
        self._signal_received.set()


def _fallback_app(settings: ServerSettings, routes: ModelRoutes, state: ServerState) -> FastAPI:
    """An API server's application without an engine, and the router's own routes for its description of the API."""
    plain = replace(settings, http_plugins=(), lora_modules=())
    models = OpenAIServingModels(("model",), "model")
    app = build_fastapi_app(state, models, HTTPMetrics(CollectorRegistry()), plain)
    for path, endpoint, summary in (
        ("/models/load", routes.load, "Load a model."),
        ("/models/unload", routes.unload, "Unload a model when its requests have ended."),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], tags=["admin"], summary=summary)
    return app
