"""Limits of each API key: requests and tokens per minute, and requests at once.

A key has a bucket of requests and one of tokens. Each holds the allowance of one minute and fills steadily. A request
takes one from the first; from the second it takes its prompt when it starts and its output when it ends, so it may
fall below zero. While a bucket is empty, requests of the key are refused (429), before their bodies are read.

Every route counts, except UNLIMITED_PATHS. Reads (GET, DELETE, cancellations) generate nothing: they need no tokens,
and have a limit of requests in flight for themselves, so that a key can follow and cancel what it has running.

Several API servers share the limits: each has counters in shared memory that only it writes, and all read the sum.
Behind a router, the router counts requests, and the servers of models their tokens and background responses.

    counters    [server][key] requests started | tokens used | requests in flight | reads in flight
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar

from starlette.types import Scope

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.server.authentication import Caller, KeyLimits, Role, key_digest
from mvllm.executor.process.shared_memory import SharedMemory

UNLIMITED_PATHS = {
    "/": "a static page",
    "/docs": "a static page",
    "/openapi.json": "a static description",
    "/health": "probes",
    "/health/live": "probes",
    "/health/ready": "probes",
    "/ping": "probes",
    "/load": "monitoring, from memory",
    "/metrics": "monitoring, from memory",
    "/version": "a constant",
    "/models": "names of models, from memory",
    "/v1/models": "names of models, from memory",
    "/v1/models/{model_id:path}": "names of models, from memory",
    "/api/tags": "names of models, from memory",
    "/api/ps": "names of models, from memory",
    "/api/version": "a constant",
}
"""The routes of GET and HEAD that do not count for the limits, with the reason."""

_ONE_MODEL = "/v1/models/"
_NUM_COUNTERS = 4
_REQUESTS, _TOKENS, _IN_FLIGHT, _READS_IN_FLIGHT = range(_NUM_COUNTERS)
_NAMES = {_REQUESTS: "requests", _TOKENS: "tokens"}
_COUNTER_BYTES = 8
_SCOPE_KEY = "mvllm.rate_limit"
_current: ContextVar[RunningRequest | None] = ContextVar("mvllm.running_request", default=None)

Headers = list[tuple[bytes, bytes]]


class KeyCounters(SharedMemory):
    """The counters of all servers and keys.

    Args:
        fd: Descriptor of the memory; this object closes it.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, num_servers: int, num_keys: int) -> KeyCounters:
        """Counters at zero."""
        return cls.allocate("rate limits", num_servers * num_keys * _NUM_COUNTERS * _COUNTER_BYTES)

    def add(self, row: int, counter: int, count: int) -> None:
        """Adds to a counter of a row, (server * keys + key). Only one process may write a row."""
        self._cells[row * _NUM_COUNTERS + counter] += count

    def total(self, key: int, counter: int, num_keys: int) -> int:
        """The sum of a key's counter over all servers."""
        return sum(self._cells[key * _NUM_COUNTERS + counter :: num_keys * _NUM_COUNTERS])

    def clear_in_flight(self, server: int, num_keys: int) -> None:
        """The requests of a server that has ended are no longer in flight."""
        for key in range(num_keys):
            for counter in (_IN_FLIGHT, _READS_IN_FLIGHT):
                self._cells[(server * num_keys + key) * _NUM_COUNTERS + counter] = 0

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._cells.release()
        super().close()


class Bucket:
    """An allowance per minute. It fills steadily and may be overdrawn.

    Args:
        per_minute: The allowance, and the most that the bucket holds.
        now: Seconds, at which it is full.
        total: What has been used until then.
    """

    def __init__(self, per_minute: int, now: float, total: int) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self._time = now
        self._total = total

    def update(self, now: float, total: int) -> None:
        """Fills it for the time since the last call, and takes what was used since then.

        Other servers may have used much in a long time, and have limited it themselves. So what has been used counts
        before the most that the bucket holds: otherwise it would be overdrawn by all of it.

        Args:
            total: What has been used since the start.
        """
        filled = (now - self._time) * self.per_minute / 60
        self.level = min(float(self.per_minute), self.level + filled - (total - self._total))
        self._time, self._total = now, total

    @property
    def seconds_until_ready(self) -> float:
        """Seconds until it holds at least one."""
        return max(0.0, (1 - self.level) * 60 / self.per_minute)

    def headers(self, name: str) -> Headers:
        """The `x-ratelimit-*` headers. `reset` is the time until it is full."""
        seconds = (self.per_minute - self.level) * 60 / self.per_minute
        values = {"limit": str(self.per_minute), "remaining": str(max(0, int(self.level))), "reset": _duration(seconds)}
        return [(f"x-ratelimit-{kind}-{name}".encode(), value.encode()) for kind, value in values.items()]


class RateLimiter:
    """The limits of all keys, in one API server.

    Args:
        keys: The limits of each user key. Administrators have none.
        default: The limits of requests without a key, all together, where the server has no keys.
        counters: Those of all servers; None for one server.
        server: Index of this server.
        clock: Seconds, monotonic.
        only_tokens: A router in front of this server has checked and counted the requests.
    """

    def __init__(
        self,
        keys: Mapping[str, KeyLimits],
        default: KeyLimits,
        counters: KeyCounters | None = None,
        server: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        only_tokens: bool = False,
    ) -> None:
        self._only_tokens = only_tokens
        named: list[tuple[bytes | None, KeyLimits]] = [(key_digest(key), limits) for key, limits in keys.items()]
        named.append((None, default))
        self._num_keys = len(named)
        self._counters = counters or KeyCounters.create(1, self._num_keys)
        self._clock = clock
        self._keys = {digest: _Key(self, i, server, limits) for i, (digest, limits) in enumerate(named)}

    @staticmethod
    def num_keys(keys: Mapping[str, KeyLimits]) -> int:
        """Keys that `KeyCounters.create` needs."""
        return len(keys) + 1

    def start(self, scope: Scope, caller: Caller) -> RunningRequest:
        """Counts a new request. The response to it has the headers of `response_headers(scope)`.

        Raises:
            APIError: The key has used up a limit (429).
        """
        key = None if caller.role is Role.ADMIN else self._keys.get(caller.key)
        if key is None or _is_unlimited(scope):
            return RunningRequest(None)
        if self._only_tokens:
            return RunningRequest(key)
        scope[_SCOPE_KEY] = key
        in_flight = _READS_IN_FLIGHT if _is_read(scope) else _IN_FLIGHT
        key.start(in_flight)
        return RunningRequest(key, in_flight)


def _is_unlimited(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in UNLIMITED_PATHS or path.startswith(_ONE_MODEL))


def _is_read(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS") or scope["path"].endswith("/cancel")


def current_request() -> RunningRequest | None:
    """The request that runs in this context; None if no limits apply."""
    return _current.get()


def set_current_request(request: RunningRequest | None) -> None:
    """Sets what `current_request` returns in this context, that of a new HTTP request."""
    _current.set(request)


class RunningRequest:
    """A request that counts for its key until `end`.

    Args:
        key: None for a request without limits.
        in_flight: The counter in which it counts as in flight; None for none.
    """

    def __init__(self, key: _Key | None, in_flight: int | None = None) -> None:
        self._key = key
        self._in_flight = in_flight
        self._num_tokens = 0
        self._num_ends = 1

    def set_tokens(self, total: int) -> None:
        """Counts tokens of its handler.

        Args:
            total: Tokens of the request so far.
        """
        self.add_tokens(total - self._num_tokens)
        self._num_tokens = total

    def add_tokens(self, count: int) -> None:
        """Counts further tokens."""
        if self._key is not None:
            self._key.count(_TOKENS, count)

    def hold(self) -> None:
        """Needs one more `end`: the request continues after its response."""
        self._num_ends += 1
        if self._key is not None and self._in_flight is None:
            self._in_flight = _IN_FLIGHT
            self._key.count(_IN_FLIGHT, 1)

    def end(self) -> None:
        """The request is no longer in flight. To be called once, and once for each `hold`."""
        self._num_ends -= 1
        if self._key is not None and self._in_flight is not None and self._num_ends == 0:
            self._key.count(self._in_flight, -1)


class _Key:
    """The limits of one key, and its buckets as this server sees them."""

    def __init__(self, limiter: RateLimiter, index: int, server: int, limits: KeyLimits) -> None:
        self._limiter, self._index, self._limits = limiter, index, limits
        self._row = server * limiter._num_keys + index
        self._buckets = {
            counter: Bucket(per_minute, limiter._clock(), self._total(counter))
            for counter, per_minute in ((_REQUESTS, limits.requests_per_minute), (_TOKENS, limits.tokens_per_minute))
            if per_minute is not None
        }

    def start(self, in_flight: int) -> None:
        limits = self._limits
        self._update()
        for counter, bucket in self._buckets.items():
            if bucket.seconds_until_ready > 0 and (counter, in_flight) != (_TOKENS, _READS_IN_FLIGHT):
                raise _too_many(
                    f"This key may use {bucket.per_minute} {_NAMES[counter]} per minute, and has used them up.",
                    bucket.seconds_until_ready,
                )
        most = limits.concurrent_requests
        if most is not None and self._total(in_flight) >= most:
            raise _too_many(f"This key may have {most} requests in flight, and has them.", 1.0)
        self.count(_REQUESTS, 1)
        self.count(in_flight, 1)

    def count(self, counter: int, count: int) -> None:
        self._limiter._counters.add(self._row, counter, count)

    def headers(self) -> Headers:
        self._update()
        return [header for counter, bucket in self._buckets.items() for header in bucket.headers(_NAMES[counter])]

    def _total(self, counter: int) -> int:
        return self._limiter._counters.total(self._index, counter, self._limiter._num_keys)

    def _update(self) -> None:
        now = self._limiter._clock()
        for counter, bucket in self._buckets.items():
            bucket.update(now, self._total(counter))


def response_headers(scope: Scope) -> Headers:
    """The `x-ratelimit-*` headers of the response to a request; none without limits."""
    key: _Key | None = scope.get(_SCOPE_KEY)
    return [] if key is None else key.headers()


def _too_many(message: str, seconds: float) -> APIError:
    retry_after = max(1, math.ceil(seconds))
    return APIError(
        429, f"{message} Try again in {retry_after} s.", code="rate_limit_exceeded", retry_after=retry_after
    )


def _duration(seconds: float) -> str:
    """`250ms`, `1.5s`, `2m3s`: as OpenAI's servers write it."""
    if seconds < 1:
        return f"{math.ceil(max(0.0, seconds) * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
