"""Limits of each API key, on simulated time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.server.authentication import APIKeys, Caller, KeyLimits, read_api_keys, read_key_limits
from mvllm.entrypoints.openai.server.rate_limits import KeyCounters, RateLimiter, RunningRequest, response_headers
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import ConfigError


class Server:
    """API servers that share limits; each request names its key."""

    def __init__(self, num_servers: int = 1, admin: tuple[str, ...] = (), **keys: KeyLimits) -> None:
        self.now = 1000.0
        self.keys = APIKeys(keys, admin)
        self.counters = KeyCounters.create(num_servers, RateLimiter.num_keys(keys))
        self.limiters = [
            RateLimiter(keys, KeyLimits(concurrent_requests=1), self.counters, i, lambda: self.now)
            for i in range(num_servers)
        ]
        self.headers: dict[str, str] = {}

    def caller(self, key: str | None) -> Caller:
        return self.keys.authenticate([] if key is None else [(b"authorization", f"Bearer {key}".encode())])

    def start(
        self, key: str | None, server: int = 0, method: str = "POST", path: str = "/v1/completions"
    ) -> RunningRequest:
        scope: dict[str, object] = {"method": method, "path": path}
        try:
            return self.limiters[server].start(scope, self.caller(key))
        finally:
            self.headers = {name.decode(): value.decode() for name, value in response_headers(scope)}

    def refuse(self, key: str | None, server: int = 0, method: str = "POST", path: str = "/v1/completions") -> APIError:
        with pytest.raises(APIError) as caught:
            self.start(key, server, method, path)
        assert caught.value.status == 429 and caught.value.code == "rate_limit_exceeded"
        return caught.value


def test_requests_per_minute_are_limited_for_each_key_and_come_back_steadily() -> None:
    server = Server(a=KeyLimits(requests_per_minute=6), b=KeyLimits(requests_per_minute=6))
    for left in (5, 4, 3, 2, 1, 0):
        server.start("a").end()
        assert server.headers["x-ratelimit-remaining-requests"] == str(left)
    assert server.headers["x-ratelimit-limit-requests"] == "6"
    assert server.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert server.refuse("a").retry_after == 10
    assert server.headers["x-ratelimit-remaining-requests"] == "0"
    server.start("b")
    server.now += 10
    server.start("a")
    assert server.refuse("a").retry_after == 10


def test_tokens_are_taken_from_the_bucket_when_they_are_known() -> None:
    server = Server(a=KeyLimits(tokens_per_minute=600))
    request = server.start("a")
    request.set_tokens(500)
    other = server.start("a")
    assert server.headers["x-ratelimit-remaining-tokens"] == "100"
    request.set_tokens(650)
    request.end()
    request_error = server.refuse("a")
    assert request_error.retry_after == 6 and "600 tokens per minute" in request_error.message
    other.end()
    server.now += 6
    server.start("a").end()
    server.now += 3600
    server.start("a")
    assert server.headers["x-ratelimit-remaining-tokens"] == "600", "no more than one minute's"


def test_requests_in_flight_are_limited_without_headers() -> None:
    server = Server(a=KeyLimits(concurrent_requests=2))
    first, _ = server.start("a"), server.start("a")
    assert not server.headers
    assert server.refuse("a").retry_after == 1
    first.end()
    server.start("a")


def test_reads_have_a_limit_of_their_own_and_need_no_tokens() -> None:
    server = Server(a=KeyLimits(concurrent_requests=1, tokens_per_minute=10))
    running = server.start("a")
    running.set_tokens(50)
    server.refuse("a")
    read = server.start("a", method="GET", path="/v1/responses/resp_1")
    server.refuse("a", method="POST", path="/v1/responses/resp_1/cancel")
    read.end()
    server.start("a", method="POST", path="/v1/responses/resp_1/cancel")
    server.refuse("a", method="GET", path="/v1/responses/resp_1")
    server.start("a", method="GET", path="/v1/models")


def test_a_request_in_the_background_is_in_flight_after_its_response() -> None:
    server = Server(a=KeyLimits(concurrent_requests=1))
    request = server.start("a")
    request.hold()
    request.end()
    server.refuse("a")
    request.end()
    server.start("a")


def test_behind_a_router_a_server_counts_tokens_and_what_runs_in_the_background() -> None:
    limits = {"a": KeyLimits(requests_per_minute=2, tokens_per_minute=100, concurrent_requests=1)}
    counters, now = KeyCounters.create(2, RateLimiter.num_keys(limits)), lambda: 1000.0
    router = RateLimiter(limits, KeyLimits(), counters, 0, now)
    model = RateLimiter(limits, KeyLimits(), counters, 1, now, only_tokens=True)
    scope, caller = {"method": "POST", "path": "/v1/responses"}, APIKeys(limits).authenticate([(b"x-api-key", b"a")])
    at_router, at_model = router.start(scope, caller), model.start(dict(scope), caller)
    at_model.hold()
    at_model.set_tokens(30)
    at_model.end()
    at_router.end()
    assert (b"x-ratelimit-remaining-tokens", b"70") in response_headers(scope)
    assert (b"x-ratelimit-remaining-requests", b"1") in response_headers(scope)
    with pytest.raises(APIError, match="in flight"):
        router.start(scope, caller)
    at_model.end()
    router.start(scope, caller)


def test_several_api_servers_share_the_limits_of_a_key() -> None:
    server = Server(num_servers=3, a=KeyLimits(requests_per_minute=2), b=KeyLimits(concurrent_requests=1))
    server.start("a", server=0)
    server.start("a", server=1)
    server.refuse("a", server=2)
    request = server.start("b", server=2)
    server.refuse("b", server=0)
    request.end()
    server.start("b", server=1)


def test_a_server_that_had_no_request_for_long_allows_what_is_left_of_this_minute() -> None:
    server = Server(num_servers=2, a=KeyLimits(requests_per_minute=60))
    for _ in range(3600):
        server.start("a", server=0).end()
        server.now += 1
    server.start("a", server=1)
    assert server.headers["x-ratelimit-remaining-requests"] == "59"


def test_without_keys_all_clients_share_one_limit_and_administrators_have_none() -> None:
    server = Server(admin=("root",))
    server.start(None)
    server.refuse(None)
    server.refuse("unknown")
    for _ in range(5):
        server.start("root")


def test_a_key_file_has_limits_behind_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nplain\n  fast  requests_per_minute=600 concurrent_requests=8\n")
    assert read_api_keys([], [str(file)], "X", None) == ["plain", "fast"]
    default = KeyLimits(requests_per_minute=10, tokens_per_minute=1000)
    limits = read_key_limits([str(file)], default)
    assert limits == {"fast": KeyLimits(600, 1000, 8)}
    settings = ServerSettings(api_keys=("plain", "fast"), key_limits=default, limits_of_keys=limits)
    assert settings.limits_by_key == {"plain": default, "fast": KeyLimits(600, 1000, 8)}
    assert ServerSettings(api_keys=("plain",)).limits_by_key is None
    for text in ("key requests=5", "key requests_per_minute=0", "key tokens_per_minute=many", "two words"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="Limits are requests_per_minute, tokens_per_minute") as caught:
            read_api_keys([], [str(file)], "X", None)
        assert "key requests" not in str(caught.value)
