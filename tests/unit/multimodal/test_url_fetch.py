"""URLs of clients reach public hosts or allowed ones, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from mvllm.errors import RequestError
from mvllm.multimodal import public_addresses, url_fetch
from mvllm.multimodal.public_addresses import is_public
from mvllm.multimodal.url_fetch import fetch_url

HOST = "media.test"


_SHOWN = ("cookie", "host")
"""Paths whose content is a header of the request."""


class Site(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        if name.startswith("to/"):
            self.send_response(302)
            self.send_header("Location", name.removeprefix("to/"))
            self.send_header("Set-Cookie", "visited=yes; Path=/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if name == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            for i in range(100):
                self.wfile.write(b"X-%d: y\r\n" % i)
                if self.server.ended.wait(0.05):  # type: ignore[attr-defined]
                    return
            return
        if name == "unending":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nthe first part")
            self.server.ended.wait(120)  # type: ignore[attr-defined]
            return
        self.send_response(404 if name == "missing" else 200)
        if name == "endless":
            self.send_header("Connection", "close")
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"x" * 4096)
            return
        body = str(self.headers["Host" if name == "host" else "Cookie"]).encode() if name in _SHOWN else b"content"
        self.send_header("Content-Length", str(len(body) + (name == "short")))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *unused: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    server.ended = threading.Event()  # type: ignore[attr-defined]
    server.handle_error = lambda *unused: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_address[1]
    server.ended.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def get(url: str, *, hosts: tuple[str, ...] | None = (HOST,), timeout: float = 5.0, max_bytes: int = 1000) -> bytes:
    return fetch_url(
        url, allowed_hosts=hosts, timeout=timeout, max_bytes=max_bytes, resolve=lambda *unused: ["127.0.0.1"]
    )


def test_an_allowed_host_is_fetched_whatever_its_address(port: int) -> None:
    assert get(f"http://{HOST}:{port}/picture") == b"content"
    assert get(f"http://{HOST.upper()}.:{port}/to//picture") == b"content"  # a relative redirect
    assert get(f"http://{HOST}:{port}/to//cookie") == b"None"


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "nonsense"),
        *("192.0.0.192", "192.88.99.1", "168.63.129.16", "fec0::1", "64:ff9b:1::7f00:1", "3fff::1", "5f00::1"),
    ],
)
def test_an_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)
    with pytest.raises(RequestError, match="address that is not public"):
        fetch_url("http://x.test/", allowed_hosts=None, timeout=1, max_bytes=1, resolve=lambda *unused: [address])


def test_public_addresses() -> None:
    assert is_public("8.8.8.8") and is_public("2606:4700:4700::1111") and is_public("::ffff:8.8.8.8")


def test_one_private_address_of_a_name_refuses_it() -> None:
    with pytest.raises(RequestError, match="not public"):
        fetch_url(
            "http://x.test/",
            allowed_hosts=None,
            timeout=1,
            max_bytes=1,
            resolve=lambda *unused: ["8.8.8.8", "10.0.0.1"],
        )


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://0x7f.1/", "http://2130706433/", "http://[::1]/"])
def test_names_of_this_machine_are_found_by_the_name_service_itself(url: str) -> None:
    with pytest.raises(RequestError, match=r"not public|cannot be resolved"):
        fetch_url(url, allowed_hosts=None, timeout=1, max_bytes=1)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_host_is_named_as_in_the_url(port: int, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get(f"http://{HOST}:{port}/host") == f"{HOST}:{port}".encode()
    sent: list[httpx2.Request] = []

    async def send(transport: object, request: httpx2.Request) -> httpx2.Response:
        sent.append(request)
        return httpx2.Response(200, stream=httpx2.ByteStream(request.headers["host"].encode()))

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", send)
    assert get(f"{scheme}://{HOST}/host") == HOST.encode()
    assert sent[0].url.host == "127.0.0.1" and sent[0].headers["accept-encoding"] == "identity"
    assert sent[0].extensions.get("sni_hostname") == (HOST if scheme == "https" else None)  # the certificate's


def test_a_redirect_is_checked_like_the_first_url(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="not in allowed_media_domains"):
        get(f"http://{HOST}:{port}/to/http://127.0.0.1:{port}/secret")
    with pytest.raises(RequestError, match="only the schemes"):
        get(f"http://{HOST}:{port}/to/file:///etc/passwd")
    with pytest.raises(RequestError, match="redirects to no valid URL"):
        get(f"http://{HOST}:{port}/to/http://[::1")
    monkeypatch.setattr(url_fetch, "is_public", lambda address: address == "127.0.0.1")  # this machine stands for one
    addresses = {"open.test": "127.0.0.1", "inner.test": "169.254.169.254"}
    with pytest.raises(RequestError, match=r"inner\.test.*not public"):
        fetch_url(
            f"http://open.test:{port}/to/http://inner.test/latest",
            allowed_hosts=None,
            timeout=5,
            max_bytes=100,
            resolve=lambda host, *unused: [addresses[host]],
        )


def test_the_checked_address_is_the_one_that_is_connected_to(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_fetch, "is_public", lambda address: address == "127.0.0.1")
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])  # a name service that changes its mind
    found = fetch_url(
        f"http://x.test:{port}/a", allowed_hosts=None, timeout=5, max_bytes=100, resolve=lambda *unused: next(answers)
    )
    assert found == b"content" and next(answers) == ["10.0.0.1"]  # asked once


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://media.test/x", "only the schemes"),
        ("http:///x", "not a valid URL"),
        ("http://media.test\\@evil.test/", "not a valid URL"),
        ("http://user:secret@media.test/", "user name or password"),
        ("http://media.test:0/", "port 0"),
        ("http://media.test:99999/", "not a valid URL"),
        ("http://other.test/", "not in allowed_media_domains"),
        ("http://media.test/" + "x" * 9000, "8192 characters"),
        ("http://media.test/a b", "not a valid URL"),
    ],
)
def test_urls_that_are_not_fetched(url: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        get(url)
    assert caught.value.parameter == "multi_modal_data"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "status 404"),
        ("endless", "more than 1000 bytes"),
        ("short", "ended before|IncompleteRead"),
        ("to/" * 3 + "to/" * 5 + "x", "more than 5 redirects"),
    ],
)
def test_contents_that_cannot_be_had(port: int, name: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        get(f"http://{HOST}:{port}/{name}")


def test_a_host_that_sends_its_answer_byte_by_byte_ends_at_the_time_limit(port: int) -> None:
    with pytest.raises(RequestError, match="took too long"):
        get(f"http://{HOST}:{port}/drip", timeout=0.4)


def test_what_has_arrived_at_the_time_limit_is_not_taken_for_the_whole(port: int) -> None:
    with pytest.raises(RequestError, match="took too long"):
        get(f"http://{HOST}:{port}/unending", timeout=0.3)


def test_a_name_service_that_does_not_answer_holds_nobody_beyond_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()

    def silent(*unused: object, **settings: object) -> list[object]:
        ended.wait(120)
        return []

    monkeypatch.setattr(public_addresses.socket, "getaddrinfo", silent)
    try:
        with pytest.raises(RequestError, match="took too long"):
            fetch_url("http://silent.test/", allowed_hosts=None, timeout=0.2, max_bytes=1)
        assert not ended.is_set()
    finally:
        ended.set()


def test_a_handshake_that_arrives_byte_by_byte_ends_at_the_time_limit() -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\x16\x03\x03\x3f\xff")  # a record of a handshake, most of which is to follow
                while not ended.wait(0.05):
                    try:
                        connection.sendall(b"\x02")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(RequestError, match="took too long"):
            get(f"https://{HOST}:{listener.getsockname()[1]}/", timeout=0.4)
        thread.join(120)
        assert not thread.is_alive(), "the connection was not closed"
        ended.set()
