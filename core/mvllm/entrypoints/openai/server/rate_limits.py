"""Limits of each API key: requests and tokens per minute, and requests at once.

A key has a bucket of requests and one of tokens. Each holds the allowance of one minute and fills steadily. A request
takes one from the first; from the second it takes its prompt when it starts and its output when it ends, so it may
fall below zero. While a bucket is empty, requests of the key are refused (429).

Several API servers share the limits: each has counters in shared memory that only it writes, and all read the sum.

    counters    [server][key] requests started | tokens used | requests in flight
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from starlette.types import Scope

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.server.authentication import Caller, KeyLimits, Role, key_digest
from mvllm.executor.process.shared_memory import SharedMemory

_NUM_COUNTERS = 3
_REQUESTS, _TOKENS, _IN_FLIGHT = range(_NUM_COUNTERS)
_COUNTER_BYTES = 8
_SCOPE_KEY = "mvllm.rate_limit"

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
            self._cells[(server * num_keys + key) * _NUM_COUNTERS + _IN_FLIGHT] = 0

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
    """

    def __init__(
        self,
        keys: Mapping[str, KeyLimits],
        default: KeyLimits,
        counters: KeyCounters | None = None,
        server: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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
        if key is None:
            return RunningRequest(None)
        scope[_SCOPE_KEY] = key
        key.start()
        return RunningRequest(key)


class RunningRequest:
    """A request that counts for its key until `end`.

    Args:
        key: None for a request without limits.
    """

    def __init__(self, key: _Key | None) -> None:
        self._key = key
        self._num_tokens = 0

    def add_tokens(self, total: int) -> None:
        """Counts tokens.

        Args:
            total: Tokens of the request so far.
        """
        if self._key is not None:
            self._key.count(_TOKENS, total - self._num_tokens)
            self._num_tokens = total

    def end(self, num_tokens: int) -> None:
        """Counts all of its tokens; the request is no longer in flight. To be called once."""
        self.add_tokens(num_tokens)
        if self._key is not None:
            self._key.count(_IN_FLIGHT, -1)


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

    def start(self) -> None:
        limits, names = self._limits, {_REQUESTS: "requests", _TOKENS: "tokens"}
        self._update()
        for counter, bucket in self._buckets.items():
            if bucket.seconds_until_ready > 0:
                raise _too_many(
                    f"This key may use {bucket.per_minute} {names[counter]} per minute, and has used them up.",
                    bucket.seconds_until_ready,
                )
        most = limits.concurrent_requests
        if most is not None and self._total(_IN_FLIGHT) >= most:
            raise _too_many(f"This key may have {most} requests in flight, and has them.", 1.0)
        self.count(_REQUESTS, 1)
        self.count(_IN_FLIGHT, 1)

    def count(self, counter: int, count: int) -> None:
        self._limiter._counters.add(self._row, counter, count)

    def headers(self) -> Headers:
        self._update()
        names = {_REQUESTS: "requests", _TOKENS: "tokens"}
        return [header for counter, bucket in self._buckets.items() for header in bucket.headers(names[counter])]

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
