"""Runs the router: one HTTP server in front of model servers, each a process with its own engine.

mvllm serve --models FILE ── HTTP ──┬─ Model_small ── EngineCore ── its workers      loaded by the first request
                                    └─ Model_large ── EngineCore ── its workers      unloaded when not used
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector

from mvllm.extension_api import get_logger
from mvllm.extension_api.server import (
    APIRouter,
    BodyReader,
    HTTPMetrics,
    KeyCounters,
    RateLimiter,
    ServerSettings,
    build_app_without_engine,
    hold_plugins,
    listener_url,
    loaded_plugins,
    run_in_event_loop,
    serve_application,
    warn_if_public,
)
from mvllm_router.model_catalog import ModelCatalog
from mvllm_router.model_entry import ModelEntry, weight_bytes
from mvllm_router.model_pool import ModelPool
from mvllm_router.model_server import ModelServerProcess, run_in_thread
from mvllm_router.pool_metrics import PoolCollector
from mvllm_router.pooled_model import ModelState, PooledModel, PoolLimits
from mvllm_router.router_app import RouterApp
from mvllm_router.router_routes import ModelRoutes

logger = get_logger(__name__)

MAX_MODELS = 1024
_POLL_SECONDS = 0.1


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
        listener: The listening socket; the caller closes it.
    """
    logger.info("Listening at %s; models that are loaded on demand: %d.", listener_url(listener), len(config.entries))
    warn_if_public(listener, config.settings)
    with hold_plugins(config.settings):
        return run_in_event_loop(RouterServer(config, listener).run())


class RouterServer:
    """The HTTP server and the models.

    Args:
        config: What to serve.
        listener: The listening socket.
    """

    def __init__(self, config: RouterConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._started = time.monotonic()
        self._ready_log: asyncio.Task[None] | None = None
        settings, limits = config.settings, config.settings.limits_by_key
        self._key_counters: KeyCounters | None = None
        self._rate_limiter: RateLimiter | None = None
        if limits is not None:  # those of the models, and the router's own
            self._key_counters = KeyCounters.create(MAX_MODELS + 1, RateLimiter.num_keys(limits))
            self._rate_limiter = RateLimiter(limits, settings.key_limits, self._key_counters, MAX_MODELS)
        self._indices: dict[str, int] = {}
        self._pool = ModelPool(config.limits, self._make_server)

    async def run(self) -> int:
        """Serves until a signal ends the router; returns the exit status."""
        settings = self._config.settings
        pool = self._pool
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
        routes = ModelRoutes(pool, catalog, reader, metrics, lambda: self._phase)
        own = APIRouter(tags=["admin"])
        for path, endpoint, summary in (
            ("/models/load", routes.load, "Load a model."),
            ("/models/unload", routes.unload, "Unload a model when its requests have ended."),
        ):
            own.add_api_route(path, endpoint, methods=["POST"], summary=summary)
        fallback, close_fallback = build_app_without_engine(settings, [own])
        self._app = RouterApp(pool, catalog, settings, fallback, routes.table())
        try:
            return await serve_application(
                self._app,
                self,
                self._listener,
                settings,
                metrics,
                rate_limiter=self._rate_limiter,
                descriptors_per_request=2,  # with one connection to a model server
            )
        finally:
            await close_fallback()
            if self._key_counters is not None:
                self._key_counters.close()

    # --- as a ServedApplication

    @property
    def num_requests(self) -> int:
        """Requests that use models or wait for them."""
        return self._pool.num_requests

    async def start(self) -> None:
        """Starts to load pinned models."""
        self._pool.start()
        self._ready_log = asyncio.create_task(self._log_ready())

    def drain(self) -> None:
        """Refuses new requests to models from now on."""
        if self._ready_log is not None:
            self._ready_log.cancel()
        self._app.is_draining = True
        self._pool.stop_keeping()

    async def close(self) -> None:
        """Aborts requests and unloads all models."""
        await self._pool.close(abort=True)

    # --- models

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

    async def _log_ready(self) -> None:
        """Logs that the pinned models are loaded, if there are any."""
        pinned = [model for model in self._pool.models.values() if model.entry.is_pinned]
        while any(model.state is not ModelState.LOADED for model in pinned):
            await asyncio.sleep(_POLL_SECONDS)
        logger.info(
            "Ready at %s after %.1f s; models: %s.",
            listener_url(self._listener),
            time.monotonic() - self._started,
            ", ".join(self._pool.models),
        )
