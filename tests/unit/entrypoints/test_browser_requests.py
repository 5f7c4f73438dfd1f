"""Web pages and servers without API keys: which `Host` and `Origin` are answered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from mvllm.entrypoints.openai.server.app import add_middleware
from mvllm.entrypoints.openai.server.browser_requests import BrowserCheck
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.settings import ServerSettings

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
PATH = "/v1/models"


def make_app(settings: ServerSettings, listener: socket.socket) -> ASGIApp:
    """An application that answers everything, with the server's middleware."""
    check = BrowserCheck.create(settings, listener)
    return add_middleware(PlainTextResponse("ok"), HTTPMetrics(CollectorRegistry()), settings, browser_check=check)


def ask(
    headers: dict[str, str], address: str = LOOPBACK, path: str = PATH, method: str = "GET", **settings: Any
) -> httpx2.Response:
    """The response to a request with these headers to a server that listens on `address`."""

    async def run() -> httpx2.Response:
        with socket.create_server((address, 0)) as listener:
            app = make_app(ServerSettings(host=address, **settings), listener)
            async with httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1:8000"
            ) as client:
                return await client.request(method, path, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "host",
    [
        *("localhost:8000", "LOCALHOST", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000", "0.0.0.0:8000", ""),
        *("192.168.1.5:8000", "localhost.", "app.localhost", "host.docker.internal:8000", "printer.local"),
        *(f"{socket.gethostname()}:8000", "chat.example", "a.pages.example:80"),
    ],
)
def test_names_of_this_machine_and_allowed_ones_are_answered(host: str) -> None:
    assert ask({"Host": host}, allowed_hosts=("Chat.example", "*.pages.example")).status_code == 200


def test_the_page_is_not_for_foreign_names_either() -> None:
    assert ask({"Host": "127.0.0.1:8000"}, path="/").status_code == 200
    assert ask({"Host": "evil.example"}, path="/").status_code == 403
    assert ask({"Origin": "http://evil.example"}, path="/").status_code == 403


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.nip.io",
            "2130706433",
        ),
        *(
            "localhost:8000@evil.example",
            "evil@localhost",
            "localhost, evil.example",
            "[::1",
            "localhost:x",
            "pages.example",
        ),
    ],
)
def test_a_name_that_a_page_has_given_this_machine_is_refused(host: str) -> None:
    """DNS rebinding: the browser takes the page's own origin for that of the server."""
    answer = ask({"Host": host, "Sec-Fetch-Site": "same-origin"}, allowed_hosts=("*.pages.example",))
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "http://localhost:3000",
            "https://127.0.0.1",
            "http://[::1]:1",
            "http://0.0.0.0:8080",
            "http://app.localhost",
        ),
        *("app://obsidian.md", "tauri://localhost", "file://", "vscode-webview://1a2b", "vscode-file://vscode-app"),
        *("chrome-extension://abc", "moz-extension://abc", "safari-web-extension://abc"),
        *("http://192.168.1.5:8000", "https://chat.example", "https://page.example"),  # own page, proxy, allowed
    ],
)
def test_local_pages_apps_and_extensions_are_answered(origin: str) -> None:
    allowed: dict[str, Any] = {"allowed_hosts": ("chat.example",), "allowed_origins": ("https://page.example",)}
    assert ask({"Host": "192.168.1.5:8000", "Origin": origin}, **allowed).status_code == 200


@pytest.mark.parametrize("address", [LOOPBACK, EVERYWHERE])
@pytest.mark.parametrize(
    "origin",
    [
        *(
            "http://evil.example",
            "https://evil.example:8000",
            "null",
            "",
            "http://localhost.evil.example",
            "http://[::1",
        ),
        *("http://192.168.1.6", "http://localhost@evil.example", "HTTPS://evil.example", "http://wiki.internal"),
    ],
)
def test_a_foreign_page_is_refused(origin: str, address: str) -> None:
    for method, path in (("GET", PATH), ("POST", "/v1/chat/completions"), ("OPTIONS", PATH), ("DELETE", "/x")):
        for more in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
            answer = ask({"Origin": origin, **more}, address, path, method)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"
    assert "--allowed-origins" in answer.json()["error"]["message"]


WITHOUT_CHECK: dict[str, Callable[[], httpx2.Response]] = {
    "a page behind a proxy that changes Host": lambda: ask(
        {"Host": "127.0.0.1:8000", "Origin": "https://chat.example", "Sec-Fetch-Site": "same-origin"}
    ),
    "a published port of a container": lambda: ask({"Host": "gpu.example:8000"}, EVERYWHERE),
    "a page of the server itself under any name": lambda: ask(
        {"Host": "gpu.example:8000", "Origin": "http://gpu.example:8000"}, EVERYWHERE
    ),
    "all origins are allowed": lambda: ask({"Origin": "http://x.example"}, allowed_origins=("*",)),
    "all hosts are allowed": lambda: ask({"Host": "x.example"}, allowed_hosts=("*",)),
    "a probe": lambda: ask({"Host": "node.example"}, path="/health"),
    "a key": lambda: ask({"Host": "x.example", "Origin": "http://y.example", "x-api-key": "k"}, api_keys=("k",)),
    "an administrator's key": lambda: ask({"Host": "x.example", "x-api-key": "k"}, admin_api_keys=("k",)),
    "a model server behind a router": lambda: ask({"Host": "x.example", "x-api-key": "u"}, router_key="k"),
}


@pytest.mark.parametrize("case", WITHOUT_CHECK)
def test_what_is_no_foreign_page(case: str) -> None:
    assert WITHOUT_CHECK[case]().status_code == 200


def test_all_names_of_the_server_are_not_all_origins() -> None:
    assert ask({"Origin": "http://evil.example"}, allowed_hosts=("*",)).status_code == 403


def test_names_are_checked_everywhere_where_the_operator_has_listed_them() -> None:
    assert ask({"Host": "evil.example"}, EVERYWHERE, allowed_hosts=("gpu.example",)).status_code == 403
    assert ask({"Host": "gpu.example"}, EVERYWHERE, allowed_hosts=("gpu.example",)).status_code == 200


def test_a_unix_socket_has_no_browser_as_its_client() -> None:
    async def run() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            app = make_app(ServerSettings(uds="x"), listener)
            async with httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app), base_url="http://proxy.example"
            ) as client:
                return (await client.get(PATH, headers={"Origin": "http://other.example"})).status_code

    assert asyncio.run(run()) == 200
