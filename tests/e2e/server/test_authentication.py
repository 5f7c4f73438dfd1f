"""API keys: only health routes are open, however a path is spelled, and no output contains a key."""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import psutil
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from mvllm.entrypoints.openai.common.api_router import APIRoute
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.server.app import build_app, build_starlette_app
from mvllm.entrypoints.openai.server.authentication import APIKeys, KeyLimits, Role, read_api_keys
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.middleware import PAGE_PATH, UNAUTHENTICATED_PATHS
from mvllm.entrypoints.openai.server.rate_limits import UNLIMITED_PATHS, RateLimiter
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import ConfigError
from tests.helpers.processes import tagged_processes
from tests.helpers.server import SMALL, ServerProcess, as_before, head_of

USER, SECOND, ADMIN = "user-key-4711", "user-key-4712", "admin-key-0815"
LIMITED = "user-key-4713"
MAX_FILES = 512
BEARERS = {"none": None, "wrong": "Bearer nobody", "user": f"Bearer {USER}", "admin": f"Bearer {ADMIN}"}


def routes() -> list[APIRoute]:
    settings = ServerSettings(api_keys=(USER,), admin_api_keys=(ADMIN,))
    app = build_starlette_app(
        ServerState(60), OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), settings
    )
    assert all(isinstance(route, APIRoute) for route in app.routes)
    return [route for route in app.routes if isinstance(route, APIRoute)]


ROUTES = [(method, route.path, "admin" in route.tags) for route in routes() for method in sorted(route.methods)]


def test_the_list_of_routes_is_complete() -> None:
    paths = {path for _, path, _ in ROUTES}
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/metrics",
        "/server_info",
        "/docs",
        *UNAUTHENTICATED_PATHS,
    } <= paths
    assert [path for _, path, is_admin in ROUTES if is_admin]


@pytest.fixture(scope="module")
def app() -> object:
    settings = ServerSettings(api_keys=(USER, SECOND), admin_api_keys=(ADMIN,))
    return build_app(ServerState(60), OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), settings)


class TestEveryRoute:
    """The whole application, in this process and with its model still loading: only the authentication middleware
    matters here."""

    @staticmethod
    def ask(app: object, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> httpx2.Response:
        async def run() -> httpx2.Response:
            transport = httpx2.ASGITransport(app=app)  # type: ignore[arg-type]
            async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, headers=headers, content=body)

        return asyncio.run(run())

    @pytest.mark.parametrize(("method", "path", "is_admin"), ROUTES)
    def test_requires_its_key(self, app: object, method: str, path: str, is_admin: bool) -> None:
        for who, bearer in BEARERS.items():
            headers = {"Authorization": bearer} if bearer else {}
            answer = self.ask(app, method, path.replace("{model_id:path}", "m"), headers)
            if path in (*UNAUTHENTICATED_PATHS, PAGE_PATH):
                assert answer.status_code not in (401, 403)
            elif who in ("none", "wrong"):
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    error = answer.json()["error"]
                    kind = error if isinstance(error, str) else error.get("code", error["type"])  # three formats
                    assert kind in ("invalid_api_key", "authentication_error") or "valid API key" in kind
            else:
                assert answer.status_code != 401
                assert (answer.status_code == 403) == (is_admin and who == "user"), (who, answer.text)

    @pytest.mark.parametrize(("method", "path", "is_admin"), ROUTES)
    def test_counts_for_the_limits_of_its_key_before_a_body_is_read(
        self, method: str, path: str, is_admin: bool
    ) -> None:
        limits = KeyLimits(requests_per_minute=1, tokens_per_minute=1000, concurrent_requests=1)
        settings = ServerSettings(api_keys=(USER, SECOND), key_limits=limits)
        limiter = RateLimiter(settings.limits_by_key or {}, limits)
        app = build_app(
            ServerState(60),
            OpenAIServingModels(["m"], "m"),
            HTTPMetrics(CollectorRegistry()),
            settings,
            rate_limiter=limiter,
        )
        url, headers = path.replace("{model_id:path}", "m"), {"Authorization": f"Bearer {USER}"}
        is_free = path in UNLIMITED_PATHS and method in ("GET", "HEAD")
        first, second = self.ask(app, method, url, headers), self.ask(app, method, url, headers, b"no JSON" * 1000)
        assert first.status_code != 429
        assert (second.status_code == 429) != is_free, UNLIMITED_PATHS.get(path)
        assert ("x-ratelimit-limit-requests" in first.headers) != is_free
        other = self.ask(app, method, url, {"Authorization": f"Bearer {SECOND}"})
        assert other.status_code != 429

    def test_a_request_beyond_a_limit_is_refused_without_its_body(self) -> None:
        limits = KeyLimits(requests_per_minute=1)
        settings = ServerSettings(api_keys=(USER,), key_limits=limits)
        limiter = RateLimiter(settings.limits_by_key or {}, limits)
        state, models = ServerState(60), OpenAIServingModels(["m"], "m")
        app = build_app(state, models, HTTPMetrics(CollectorRegistry()), settings, rate_limiter=limiter)

        async def receive() -> Message:
            raise AssertionError("the body was read")

        async def run() -> list[Message]:
            sent: list[Message] = []

            async def send(message: Message) -> None:
                sent.append(message)

            for _ in range(2):
                headers = [(b"authorization", f"Bearer {USER}".encode()), (b"content-type", b"application/json")]
                scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": headers}
                await app(scope, receive, send)
            return sent

        assert [each["status"] for each in asyncio.run(run()) if "status" in each] == [503, 429]

    @pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "MADEUP"])
    def test_no_method_bypasses_authentication(self, app: object, method: str) -> None:
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/server_info", "/nothing"):
            assert self.ask(app, method, path, {}).status_code == 401
        assert self.ask(app, method, "/", {}).status_code == (200 if method in ("GET", "HEAD") else 401)

    def test_the_page_needs_no_key_and_has_nothing_of_the_server(self, app: object) -> None:
        page = self.ask(app, "GET", "/", {"Accept": "text/html,*/*"})
        assert page.headers["content-type"].startswith("text/html") and 'id="key"' in page.text
        settings = ServerSettings(served_model_names=("secret-name",))
        open_app = build_app(
            ServerState(60), OpenAIServingModels(["secret-name"], "m"), HTTPMetrics(CollectorRegistry()), settings
        )
        assert self.ask(open_app, "GET", "/", {"Accept": "text/html,*/*"}).text == page.text

    @pytest.mark.parametrize(
        ("accept", "is_page"),
        [
            ("Text/HTML", True),
            ("*/*;q=0.5, text/html ; q=0.01", True),
            ("text/html;q=0", False),
            ("text/html; q=0.000, */*", False),
            ("text/htmlx", False),
            ("application/json;a=text/html", False),
            ("", False),
        ],
    )
    def test_the_root_is_a_page_for_those_who_accept_html(self, app: object, accept: str, is_page: bool) -> None:
        answer = self.ask(app, "GET", "/", {"Accept": accept})
        assert answer.headers["content-type"].partition(";")[0] == ("text/html" if is_page else "text/plain")
        assert answer.headers["vary"] == "Accept"

    def test_without_the_page_the_root_needs_a_key(self) -> None:
        settings = ServerSettings(api_keys=(USER,), docs=False)
        app = build_app(ServerState(60), OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), settings)
        for accept in ("text/html", "*/*"):
            assert self.ask(app, "GET", "/", {"Accept": accept}).status_code == 401
            answer = self.ask(app, "GET", "/", {"Accept": accept, "Authorization": f"Bearer {USER}"})
            assert answer.headers["content-type"].startswith("text/plain") and "/docs" not in answer.text


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text(
        f"# of the second user\n{SECOND}\n{LIMITED} requests_per_minute=1 tokens_per_minute=500\n"
    )
    arguments = ["demo", "--port", "0", "--api-key", USER, "--api-key-file", str(folder / "keys"), *SMALL]
    with ServerProcess(folder, *arguments, MVLLM_ADMIN_API_KEY=ADMIN, MVLLM_LOGGING_LEVEL="DEBUG") as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (256, MAX_FILES))
        server.wait_ready()
        with server.client(headers={"Authorization": f"Bearer {USER}"}) as client, as_before(server, client):
            yield server


def test_a_key_beyond_its_limits_gets_429_and_learns_when_to_try_again(guarded: ServerProcess) -> None:
    ask = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
    with guarded.client(headers={"Authorization": f"Bearer {LIMITED}"}) as client:
        started = time.monotonic()
        first = client.post("/v1/completions", json=ask)
        refilled = (time.monotonic() - started) * 500 / 60  # at most
        assert first.status_code == 200 and first.headers["x-ratelimit-remaining-requests"] == "0"
        used = first.json()["usage"]["total_tokens"]
        assert 500 - used <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 500 - used + refilled
        second = client.post("/v1/completions", json=ask | {"stream": True})
        assert second.status_code == 429 and second.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(second.headers["retry-after"]) <= 60
        assert second.headers["x-ratelimit-limit-requests"] == "1"
        assert client.post("/tokenize", json={"prompt": "Once"}).status_code == 429
        assert client.get("/v1/models").status_code == 200
    with guarded.client(headers={"Authorization": f"Bearer {SECOND}"}) as client:
        for _ in range(2):
            answer = client.post("/v1/completions", json=ask)
            assert answer.status_code == 200 and "x-ratelimit-limit-requests" not in answer.headers


ODD_HEADS = [
    head_of("GET", path, *headers)
    for path, headers in itertools.product(
        ["//v1/models", "/%761/models", "/v1/../v1/models", "http://x/v1/models", "/health/../v1/models",
         "/v1/models?/health", "/health;/v1/models", "/v1/models%00/health", "/health%2f..%2fv1%2fmodels"],
        [[], ["X-Forwarded-Prefix: /health"], ["Host: /health"], ["Authorization: Basic " + USER],
         ["Authorization: " + USER], ["Authorization: Bearer"], ["Authorization: Bearer " + USER[:-1]],
         ["Authorization: Bearer " + USER, "Authorization: Bearer nobody"]],
    )
]  # fmt: skip


def test_no_spelling_of_a_path_bypasses_authentication(guarded: ServerProcess) -> None:
    for data in ODD_HEADS:
        answer = guarded.exchange(data)
        assert answer.split()[1] in (b"401", b"400"), (data, answer)
        assert b'"object":"list"' not in answer


def test_each_key_permits_its_routes(guarded: ServerProcess) -> None:
    with guarded.client() as client:
        for key, models, admin in ((USER, 200, 403), (SECOND, 200, 403), (ADMIN, 200, 200), ("nobody", 401, 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get("/v1/models", headers=headers).status_code == models
            assert client.get("/server_info", headers=headers).status_code == admin
            assert client.post("/reset_prefix_cache", headers=headers).status_code == admin
            assert client.post("/reset_mm_cache", headers=headers).status_code == admin
        assert client.get("/health").status_code == 200
        headers = {"Authorization": f"bearer {USER}"}
        assert client.post("/v1/completions", headers=headers, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_sleep_and_wake_up_need_an_admin_key(guarded: ServerProcess) -> None:
    with guarded.client(headers={"Authorization": f"Bearer {ADMIN}"}) as client:
        ask = {"prompt": "x", "max_tokens": 1}
        assert client.post("/sleep?level=made-up").status_code == 400
        assert client.post("/sleep?level=9").status_code == 400
        greedy = {"prompt": "Once", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        text = client.post("/v1/completions", json=greedy).json()["choices"][0]["text"]
        for level in ("", "?level=2"):
            assert client.post(f"/sleep{level}").json() == {"is_sleeping": True} == client.get("/is_sleeping").json()
            for path, body in (("/v1/completions", ask), ("/v1/embeddings", {"input": "x"})):
                refused = client.post(path, json=body)
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert client.get("/health/ready").status_code == 503 and client.get("/health/live").status_code == 200
            unknown = client.post("/wake_up?tags=everything")
            assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "tags"
            assert client.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
            assert client.post("/wake_up").json() == {"is_sleeping": False}
            assert client.post("/v1/completions", json=greedy).json()["choices"][0]["text"] == text


def test_clients_without_a_key_cannot_exhaust_the_descriptors(guarded: ServerProcess) -> None:
    """More half-sent request heads than the server may open files, the maximum that it permits: probes and users are
    answered."""
    assert psutil.Process(guarded.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (MAX_FILES, MAX_FILES)
    with guarded.client(headers={"Authorization": f"Bearer {USER}"}) as client, ExitStack() as stack:
        for index in range(MAX_FILES + 100):
            stranger = stack.enter_context(socket.create_connection(guarded.address, timeout=120))
            stranger.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            if index % 100 == 0:
                assert client.get("/health/live", headers={"Connection": "close"}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert guarded.log.count("connections are in use") == 1 and "can be accepted" not in guarded.log


def test_keys_appear_in_no_log_and_no_response(guarded: ServerProcess) -> None:
    with guarded.client(headers={"Authorization": f"Bearer {ADMIN}"}) as client:
        shown = [client.get(path).text for path in ("/server_info", "/metrics", "/openapi.json", "/docs")]
    ps = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    children = [p for p in tagged_processes(guarded.tag) if p.pid != guarded.process.pid]
    assert children
    environments = [str(psutil.Process(p.pid).environ()) for p in children]
    for key in (USER, SECOND, ADMIN):
        assert not any(key in text for text in (*shown, ps, guarded.log, *environments))


class TestKeys:
    def test_without_keys_users_need_none_and_admin_routes_are_closed(self) -> None:
        keys = APIKeys()
        assert keys.authenticate([]).role is Role.USER
        assert keys.authenticate([(b"authorization", b"Bearer x")]).role is Role.USER

    def test_each_of_many_keys_is_valid_and_similar_strings_are_not(self) -> None:
        keys = APIKeys([f"user-{index}" for index in range(5000)], ["boss"])
        callers = {keys.authenticate([(b"authorization", b"Bearer user-%d" % index)]) for index in range(5000)}
        assert len(callers) == 5000 and {caller.role for caller in callers} == {Role.USER}
        for bearer in (b"Bearer user-", b"Bearer user-50000", b"Bearer ", b"Bearer " + b"u" * 60_000, b"Bearer \xff"):
            assert keys.authenticate([(b"authorization", bearer)]).role is Role.UNAUTHENTICATED
        assert keys.authenticate([(b"authorization", b"Bearer boss")]).role is Role.ADMIN

    @pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "ü"])
    def test_invalid_keys_are_rejected(self, key: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError):
            read_api_keys([key], [], "X", None)
        with pytest.raises(ConfigError):
            read_api_keys([], [], "X", key)

    def test_a_file_without_a_key_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "empty").write_text("# nothing\n\n")
        for name in ("empty", "missing"):
            with pytest.raises(ConfigError, match="API keys"):
                read_api_keys([], [str(tmp_path / name)], "X", None)


def test_a_key_may_be_in_either_header() -> None:
    keys = APIKeys([USER, SECOND], [ADMIN])

    def role(*headers: tuple[bytes, str]) -> Role:
        return keys.authenticate([(name, value.encode()) for name, value in headers]).role

    bearer, other = b"authorization", b"x-api-key"
    assert role((other, USER)) is Role.USER and role((other, ADMIN)) is Role.ADMIN
    assert role((bearer, "Bearer nobody"), (other, USER)) is Role.USER  # the first is another service's
    assert role((bearer, f"Bearer {USER}"), (other, ADMIN)) is Role.USER
    for refused in ([(other, "nobody")], [(other, USER)] * 2, [(bearer, f"Bearer {USER}")] * 2 + [(other, USER)]):
        assert role(*refused) is Role.UNAUTHENTICATED
