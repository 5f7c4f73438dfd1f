"""A model of a router's pool: its state, and what is known about it."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mvllm.extension_api import APIError, MvllmError
from mvllm_router.model_entry import ModelEntry

_MAX_ERROR_LENGTH = 2000


class ModelState(enum.Enum):
    """The states of a model. See `model_pool`."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    UNLOADING = "unloading"


@dataclass(frozen=True)
class PoolLimits:
    """The limits of all models together.

    Attributes:
        max_loaded_models: Models that are loaded at once; 0 for no limit.
        max_loaded_bytes: Memory of the loaded models together; None for no limit.
        max_waiting_requests: Requests that wait for loads at once.
        load_timeout: Seconds that a request waits for its model.
    """

    max_loaded_models: int = 4
    max_loaded_bytes: int | None = None
    max_waiting_requests: int = 512
    load_timeout: float = 300.0


class ModelServer(Protocol):
    """A loaded model, or one that is being loaded."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, once it is loaded; 0 if it is not known."""

    async def check(self) -> None:
        """Raises if the model surely cannot be loaded, before others are unloaded for it."""

    async def start(self) -> None:
        """Loads the model. Raises why it cannot be loaded."""

    async def stop(self, *, abort: bool = False) -> None:
        """Frees the model, also while it starts. `abort` ends its requests. Idempotent."""


class KeepAlive(enum.Enum):
    """How long a request keeps its model, where the request does not say."""

    OF_ENTRY = "as the model's entry says"


MakeServer = Callable[[ModelEntry, Callable[[Exception], None]], ModelServer]
"""Makes the server of a model. It calls the function with the reason when the server dies."""


class PooledModel:
    """A model of the pool. Only the pool changes it.

    Attributes:
        entry: Its names and limits.
        state: Its state.
        server: Its server; None in the state UNLOADED.
        num_in_flight: Requests that use it.
        keep_alive: Seconds without requests after which it is unloaded, by the last request; None for never.
        last_used: Monotonic time of the last start or end of a request.
        idle_since: Monotonic time since which no request uses it.
        failure: Why it is not loaded, if its last load failed or its server died.
        known_bytes: Estimate of its memory.
        adapters: Names of its LoRA adapters beside those of its entry.
    """

    def __init__(self, entry: ModelEntry, known_bytes: int = 0) -> None:
        self.entry = entry
        self.state = ModelState.UNLOADED
        self.server: ModelServer | None = None
        self.num_in_flight = 0
        self.keep_alive = entry.keep_alive
        self.last_used = self.idle_since = time.monotonic()
        self.failure: Exception | None = None
        self.known_bytes = entry.memory_bytes or known_bytes
        self.adapters: frozenset[str] = frozenset()
        self._waiting: dict[asyncio.Future[None], int] = {}  # with the bytes of their bodies
        self._num_failures = 0
        self._retry_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._num_drains = 0
        self._is_suspended = False  # unloaded by an administrator, although it is pinned

    @property
    def is_loaded(self) -> bool:
        """Whether a request can use it at once."""
        return self.state is ModelState.LOADED

    @property
    def is_idle(self) -> bool:
        return self.num_in_flight == 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for its load."""
        return len(self._waiting)

    @property
    def failure_text(self) -> str | None:
        """Why it is not loaded, for clients; None without a failure."""
        return None if self.failure is None else describe_failure(self.failure)


def describe_failure(error: BaseException) -> str:
    """Why a model is not loaded, for clients: the first line of an error that is written for users."""
    if isinstance(error, APIError):
        return error.message
    if not isinstance(error, MvllmError):
        return "an internal error occurred; see the server's log"
    return str(error).partition("\n")[0][:_MAX_ERROR_LENGTH]


def load_error(model: PooledModel, error: Exception, retry_seconds: float) -> APIError:
    """The error of requests for a model that cannot be loaded."""
    return APIError(
        503,
        f"The model `{model.entry.name}` cannot be loaded: {describe_failure(error)}",
        code="model_load_failed",
        retry_after=max(1, round(retry_seconds)),
    )


def check_pinned(entries: Iterable[ModelEntry], limits: PoolLimits) -> Sequence[str]:
    """Names of the pinned models. They, and one place for each of the others in turn, must fit into the limits.

    Raises:
        ValueError: They do not; the message says what to do.
    """
    entries = list(entries)
    pinned = [entry.name for entry in entries if entry.is_pinned]
    needed = len(pinned) + (len(pinned) < len(entries))
    if limits.max_loaded_models and needed > limits.max_loaded_models:
        raise ValueError(
            f"{len(pinned)} models are pinned, so at least {needed} have to be loaded at once, but the limit is "
            f"{limits.max_loaded_models}. Raise --max-loaded-models, or pin fewer."
        )
    return pinned


def shutting_down_error() -> APIError:
    """The error of requests while the server shuts down."""
    return APIError(503, "The server is shutting down.", code="shutting_down", retry_after=5)
