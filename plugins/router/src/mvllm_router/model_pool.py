"""The models of a router: loaded by the first request, unloaded least recently used, never while a request uses them.

    UNLOADED ── a request ──> LOADING ──> LOADED ── idle ──> UNLOADING ──> UNLOADED
        ^                        │           │ its place is needed, but requests use it
        └──── its load fails ────┘           └──> DRAINING ── the last one ends ──> UNLOADING

Requests for a model that is not loaded wait in its queue. One task loads the models that are waited for, one at a time
in the order of their first request: an engine measures the free memory while it starts. Before a load that task makes
room: it unloads idle models, the least recently used first; if all are busy, the least recently used one gets no new
requests until it is idle. All methods run in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from mvllm.extension_api import APIError, MvllmError, get_logger
from mvllm.extension_api.server import CacheError, StepMemoryError
from mvllm_router.pool_metrics import PoolMetrics
from mvllm_router.pooled_model import (
    KeepAlive,
    MakeServer,
    ModelServer,
    ModelState,
    PooledModel,
    PoolLimits,
    load_error,
    shutting_down_error,
)

logger = get_logger(__name__)

MAX_WAITING_BYTES = 256 << 20
"""Bytes of all bodies of requests that wait for a load."""
_MAX_RETRY_SECONDS = 60.0


class ModelPool:
    """The models, and what loads and unloads them.

    Args:
        limits: The limits of all models together.
        make_server: Makes the server of a model.
        metrics: Counts loads and unloads.
    """

    def __init__(self, limits: PoolLimits, make_server: MakeServer, metrics: PoolMetrics | None = None) -> None:
        self.models: dict[str, PooledModel] = {}
        self.metrics = metrics or PoolMetrics()
        self._limits = limits
        self._make_server = make_server
        self._queue: dict[PooledModel, None] = {}  # models with waiting requests, by the first of them
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._is_closed = False

    def start(self) -> None:
        """Starts to load models: pinned ones now, others when requests need them."""
        self._spawn(self._load_wanted_models())
        for model in self.models.values():
            if model.entry.is_pinned:
                self._keepers.append(self._spawn(self._keep_loaded(model)))

    def stop_keeping(self) -> None:
        """From now on only requests load models, and pinned models are not loaded again."""
        for task in self._keepers:
            task.cancel()

    async def close(self, *, abort: bool = False) -> None:
        """Unloads all models; requests that wait get an error.

        Args:
            abort: End the requests that use models.
        """
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        for model in self.models.values():
            self._fail_waiting(model, shutting_down_error)
        servers = [model.server for model in self.models.values() if model.server is not None]
        await asyncio.gather(*(server.stop(abort=abort) for server in servers), return_exceptions=True)

    def add(self, model: PooledModel) -> None:
        """Adds a model that is not loaded."""
        self.models[model.entry.name] = model

    def find(self, name: str) -> PooledModel | None:
        """The model with a name, an alias or a LoRA adapter of this name."""
        if (model := self.models.get(name)) is not None:
            return model
        found = (each for each in self.models.values() if name in each.entry.names or name in each.adapters)
        return next(found, None)

    @property
    def num_requests(self) -> int:
        """Requests that use models or wait for them."""
        return sum(model.num_in_flight + model.num_waiting for model in self.models.values())

    def loaded(self) -> list[PooledModel]:
        """The models that requests can use at once, and those that become idle."""
        return [each for each in self.models.values() if each.state in (ModelState.LOADED, ModelState.DRAINING)]

    # --- requests

    @contextlib.asynccontextmanager
    async def use(
        self, model: PooledModel, num_bytes: int = 0, keep_alive: float | KeepAlive | None = KeepAlive.OF_ENTRY
    ) -> AsyncIterator[ModelServer]:
        """The server of a model, which stays loaded within the context. Waits until it is loaded.

        Args:
            num_bytes: Bytes of the request's body.
            keep_alive: Seconds to keep the model after this request, None for ever; by default as its entry says.

        Raises:
            APIError: The model has too many requests (429); too many requests wait, the load fails or takes too long
                (503).
        """
        await self._acquire(model, num_bytes)
        try:
            if (server := model.server) is None:  # it died at that moment
                raise load_error(model, model.failure or MvllmError("its server has stopped"), 1.0)
            yield server
        finally:
            self._release(model, model.entry.keep_alive if keep_alive is KeepAlive.OF_ENTRY else keep_alive)

    async def _acquire(self, model: PooledModel, num_bytes: int) -> None:
        if self._is_closed:
            raise shutting_down_error()
        limit = model.entry.max_concurrent_requests
        if limit is not None and model.num_in_flight + model.num_waiting >= limit:
            raise APIError(
                429,
                f"The model `{model.entry.name}` may have {limit} requests at once, and has them. Try again soon.",
                code="queue_full",
                retry_after=1,
            )
        if model.is_loaded:
            self._begin(model)
            return
        wait_seconds = model._retry_at - time.monotonic()
        if model.failure is not None and wait_seconds > 0 and not model._waiting:
            raise load_error(model, model.failure, wait_seconds)
        waiting = sum(each.num_waiting for each in self.models.values())
        waiting_bytes = sum(sum(each._waiting.values()) for each in self.models.values())
        if waiting >= self._limits.max_waiting_requests or waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            raise APIError(
                503,
                f"The model `{model.entry.name}` is not loaded, and {waiting} requests wait for models already.",
                code="loading",
                retry_after=5,
            )
        await self._wait_loaded(model, num_bytes)

    async def _wait_loaded(self, model: PooledModel, num_bytes: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model._waiting[future] = num_bytes
        model._is_suspended = False
        self._queue.setdefault(model)
        self._notify()
        try:
            async with asyncio.timeout(self._limits.load_timeout):
                await future
        except TimeoutError:
            self._undo_wait(model, future)
            raise APIError(
                503,
                f"The model `{model.entry.name}` is {model.state.value}; the request has waited "
                f"{self._limits.load_timeout:g} s.",
                code="loading",
                retry_after=10,
            ) from None
        except asyncio.CancelledError:
            self._undo_wait(model, future)
            raise

    def _undo_wait(self, model: PooledModel, future: asyncio.Future[None]) -> None:
        model._waiting.pop(future, None)
        if future.done() and not future.cancelled() and future.exception() is None:  # it got the model at that moment
            self._release(model, model.entry.keep_alive)
        self._notify()

    def _begin(self, model: PooledModel) -> None:
        model.num_in_flight += 1
        model.last_used = time.monotonic()
        if model._timer is not None:
            model._timer.cancel()
            model._timer = None

    def _release(self, model: PooledModel, keep_alive: float | None) -> None:
        model.num_in_flight -= 1
        model.last_used = time.monotonic()
        model.keep_alive = keep_alive
        if model.is_idle:
            model.idle_since = model.last_used
            self._schedule_expiry(model)
            self._notify()

    def _grant_waiting(self, model: PooledModel) -> None:
        """Lets the waiting requests use the model."""
        self._queue.pop(model, None)
        waiting, model._waiting = model._waiting, {}
        for future in waiting:
            if not future.done():
                self._begin(model)
                future.set_result(None)
        if model.is_idle:
            self._schedule_expiry(model)

    def _fail_waiting(self, model: PooledModel, make_error: Callable[[], APIError]) -> None:
        self._queue.pop(model, None)
        waiting, model._waiting = model._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(make_error())  # one each: raising adds a traceback to it

    # --- loads

    async def load(self, model: PooledModel) -> None:
        """Loads a model, if it is not. Raises as `use`."""
        # The request that had it unloaded at once does not concern the next load.
        keep_alive = model.keep_alive if model.is_loaded else model.entry.keep_alive
        async with self.use(model, keep_alive=keep_alive):
            pass

    async def _load_wanted_models(self) -> None:
        while True:
            leaving = (ModelState.DRAINING, ModelState.UNLOADING)  # needed again before they are unloaded
            model = next((each for each in self._queue if each.state not in leaving), None)
            if model is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                await self._load_for_waiting(model)
            except Exception as e:  # noqa: BLE001  (reported to the waiting requests)
                self._on_load_failure(model, e)

    async def _load_for_waiting(self, model: PooledModel) -> None:
        while model.state is not ModelState.LOADED:
            server = self._new_server(model)
            try:
                await server.check()
                if not await self._make_room(model):
                    self._queue.pop(model, None)  # nobody waits any more
                    return
                is_loaded = await self._load_in_room(model, server)
            finally:
                if model.server is not server:
                    await server.stop()
            if is_loaded:
                break
        self._grant_waiting(model)
        self._unload_if_over_budget(model)

    def _new_server(self, model: PooledModel) -> ModelServer:
        server = self._make_server(model.entry, lambda error: self._on_death(model, server, error))
        return server

    async def _load_in_room(self, model: PooledModel, server: ModelServer) -> bool:
        """Loads a model; returns False if one had to be unloaded because both did not fit. Raises any other failure."""
        started = time.monotonic()
        logger.info("Loading the model %s.", model.entry.name)
        model.server = server
        self._set_state(model, ModelState.LOADING)
        try:
            await server.start()
        except Exception as e:
            await self._free(model)
            self.metrics.count_load(model.entry.name, time.monotonic() - started, failed=True)
            victim = self._least_recently_used(idle=True)
            if not isinstance(e, CacheError | StepMemoryError) or victim is None:
                raise
            logger.info("The model %s does not fit beside %s: %s", model.entry.name, victim.entry.name, e)
            await self._stop(victim, "memory")
            return False
        except BaseException:
            await asyncio.shield(self._free(model))
            raise
        self._set_state(model, ModelState.LOADED)
        model.failure = None
        model._num_failures = 0
        model.last_used = model.idle_since = time.monotonic()
        if model.entry.memory_bytes is None:
            model.known_bytes = server.num_bytes or model.known_bytes
        seconds = time.monotonic() - started
        self.metrics.count_load(model.entry.name, seconds, failed=False)
        logger.info("The model %s is loaded after %.1f s.", model.entry.name, seconds)
        return True

    def _on_load_failure(self, model: PooledModel, error: Exception) -> None:
        model.failure = error
        model._num_failures += 1
        seconds = min(_MAX_RETRY_SECONDS, 2.0 ** (model._num_failures - 1))
        model._retry_at = time.monotonic() + seconds
        logger.error("The model %s cannot be loaded: %s", model.entry.name, error)
        self._fail_waiting(model, lambda: load_error(model, error, seconds))
        self._notify()

    async def _keep_loaded(self, model: PooledModel) -> None:
        """Loads a pinned model at the start, and again when it has died."""
        while True:
            if model.state is ModelState.UNLOADED and not model._is_suspended:
                try:
                    await self.load(model)
                except APIError as e:
                    await asyncio.sleep(float(e.retry_after or 1))
                continue
            await self._wait_until(lambda: model.state is ModelState.UNLOADED and not model._is_suspended)

    # --- room

    async def _make_room(self, model: PooledModel) -> bool:
        """Unloads models until `model` fits; returns False when no request waits for it any more.

        Raises:
            APIError: Only pinned models are loaded, so there will be no room.
        """
        draining: PooledModel | None = None
        try:
            while True:
                if not model._waiting:
                    return False
                if self._has_room(model):
                    return True
                if (victim := self._least_recently_used(idle=True)) is not None:
                    await self._stop(victim, "room")
                    continue
                if draining is None or draining.state is not ModelState.DRAINING:
                    self._end_drain(draining)
                    draining = self._least_recently_used(idle=False)
                    if draining is not None:
                        self._begin_drain(draining)
                    elif not any(each.state is ModelState.UNLOADING for each in self.models.values()):
                        raise MvllmError("the pinned models leave no room for it")
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._end_drain(draining)

    def _has_room(self, model: PooledModel) -> bool:
        others = [each for each in self.models.values() if each.state is not ModelState.UNLOADED and each is not model]
        limits = self._limits
        if limits.max_loaded_models and len(others) >= limits.max_loaded_models:
            return False
        if limits.max_loaded_bytes is None or not others:
            return True
        return sum(each.known_bytes for each in (*others, model)) <= limits.max_loaded_bytes

    def _unload_if_over_budget(self, model: PooledModel) -> None:
        """After a load has shown how much memory the model takes, others may have to go."""
        limit = self._limits.max_loaded_bytes
        while limit is not None and sum(each.known_bytes for each in self.loaded()) > limit:
            victim = self._least_recently_used(idle=True, beside=model)
            if victim is None:
                return
            self._set_state(victim, ModelState.UNLOADING)
            self._spawn(self._stop_marked(victim, "memory"))

    def _least_recently_used(self, *, idle: bool, beside: PooledModel | None = None) -> PooledModel | None:
        """The model to unload for another one; None if there is none."""
        found = [each for each in self.loaded() if not each.entry.is_pinned and each is not beside]
        if idle:
            found = [each for each in found if each.is_idle]
        return min(found, key=lambda each: each.last_used, default=None)

    def _begin_drain(self, model: PooledModel) -> None:
        model._num_drains += 1
        self._set_state(model, ModelState.DRAINING)

    def _end_drain(self, model: PooledModel | None) -> None:
        """The model may have new requests again, unless it has been unloaded or must be for another reason."""
        if model is None:
            return
        model._num_drains -= 1
        if model.state is ModelState.DRAINING and model._num_drains == 0:
            self._set_state(model, ModelState.LOADED)
            self._grant_waiting(model)

    # --- unloads

    async def unload(self, model: PooledModel) -> bool:
        """Unloads a model when its running requests have ended; returns whether it was loaded. A load that has begun
        ends first.

        A pinned model stays unloaded until a request needs it.
        """
        model._is_suspended = True
        try:
            await self._wait_until(lambda: model.state not in (ModelState.LOADING, ModelState.UNLOADING))
            if model.state is ModelState.UNLOADED:
                return False
            self._begin_drain(model)
            try:
                await self._wait_until(lambda: model.is_idle or model.state is not ModelState.DRAINING)
                if model.state is ModelState.DRAINING:
                    await self._stop(model, "request")
            finally:
                self._end_drain(model)
            await self._wait_until(lambda: model.state is not ModelState.UNLOADING)
            return True
        except asyncio.CancelledError:
            if model.state is not ModelState.UNLOADING:  # it stays, and a pinned one is loaded again if it dies
                model._is_suspended = False
                self._notify()
            raise

    async def unload_when_idle(self, model: PooledModel) -> None:
        """Unloads a model now if no request uses it, else after its requests, unless a later one keeps it."""
        model.keep_alive = 0.0
        if model.is_loaded and model.is_idle:
            await self._stop(model, "request")

    def seconds_until_expiry(self, model: PooledModel) -> float | None:
        """Seconds until a loaded model is unloaded if no request comes; None for never."""
        if model.keep_alive is None or model.entry.is_pinned:
            return None
        since = model.idle_since if model.is_idle else time.monotonic()
        return max(0.0, since + model.keep_alive - time.monotonic())

    def _schedule_expiry(self, model: PooledModel) -> None:
        if model._timer is not None:
            model._timer.cancel()
            model._timer = None
        if model.keep_alive is not None and not model.entry.is_pinned and not self._is_closed:
            model._timer = asyncio.get_running_loop().call_later(model.keep_alive, self._expire, model)

    def _expire(self, model: PooledModel) -> None:
        model._timer = None
        if model.is_loaded and model.is_idle:
            self._set_state(model, ModelState.UNLOADING)
            self._spawn(self._stop_marked(model, "idle"))

    async def _stop(self, model: PooledModel, reason: str) -> None:
        self._set_state(model, ModelState.UNLOADING)
        await asyncio.shield(self._spawn(self._stop_marked(model, reason)))

    async def _stop_marked(self, model: PooledModel, reason: str) -> None:
        logger.info("Unloading the model %s (%s).", model.entry.name, _REASONS[reason])
        await self._free(model)
        self.metrics.count_unload(model.entry.name, reason)

    async def _free(self, model: PooledModel) -> None:
        """Ends the server of a model, which is unloaded then."""
        self._set_state(model, ModelState.UNLOADING)
        if model._timer is not None:
            model._timer.cancel()
            model._timer = None
        if model.server is not None:
            try:
                await model.server.stop()
            except Exception:
                logger.exception("The server of the model %s could not be ended.", model.entry.name)
        model.server = None
        model.adapters = frozenset()
        self._set_state(model, ModelState.UNLOADED)

    def _on_death(self, model: PooledModel, server: ModelServer, error: Exception) -> None:
        """The server of a loaded model has died. The next request loads it again."""
        if model.server is not server or model.state not in (ModelState.LOADED, ModelState.DRAINING):
            return
        logger.error("The model %s has stopped; the next request loads it again: %s", model.entry.name, error)
        model.failure = error
        model._retry_at = 0.0
        self._set_state(model, ModelState.UNLOADING)
        self._spawn(self._stop_marked(model, "death"))

    # --- tasks

    async def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    def _set_state(self, model: PooledModel, state: ModelState) -> None:
        """Changes a model's state, and wakes those who wait for a change."""
        model.state = state
        self._notify()

    def _notify(self) -> None:
        self._changed.set()

    def _spawn(self, coroutine: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_REASONS = {
    "room": "its place is needed",
    "memory": "its memory is needed",
    "idle": "it was not used",
    "request": "as requested",
    "death": "its server has stopped",
}
