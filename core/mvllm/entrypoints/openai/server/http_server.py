"""Runs an application in the event loop with the HTTP of the server, until a signal ends it.

`serve_application` is for applications beside the API server of a model, such as a router. After the first SIGTERM,
SIGINT or SIGHUP running requests finish; a second signal aborts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from mvllm.entrypoints.openai.server.app import add_middleware
from mvllm.entrypoints.openai.server.browser_requests import BrowserCheck
from mvllm.entrypoints.openai.server.connections import ConnectionTable, RateLimitedWarning, default_max_connections
from mvllm.entrypoints.openai.server.heartbeat_monitor import HEARTBEAT_INTERVAL_SECONDS
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_protocol import LimitedHttpProtocol, uvicorn_settings
from mvllm.entrypoints.openai.server.rate_limits import RateLimiter
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.shutdown_signals import SHUTDOWN_SECONDS, force_exit_after, shutdown_signals
from mvllm.logging import get_logger

logger = get_logger(__name__)

FINAL_RESPONSES_SECONDS = 5.0
_POLL_SECONDS = 0.5
_DRAIN_POLL_SECONDS = 0.05
_ACCEPT_RETRY_SECONDS = 0.5
_MAX_ACCEPTS_PER_TURN = 16


class HTTPServer(uvicorn.Server):
    """uvicorn's server, without its signal handlers and with a limit on connections.

    Args:
        heartbeat: Called every second by a server of several. Its processes accept connections from one socket, each
            one connection per turn of the event loop, so that busy processes get fewer.
        max_connections: Most connections beside those of health probes.
    """

    def __init__(self, app: ASGIApp, heartbeat: Callable[[], None] | None, max_connections: int) -> None:
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=2, **uvicorn_settings()))
        self._heartbeat = heartbeat
        self.server_state: ConnectionTable = ConnectionTable(max_connections)
        self._stop_event = asyncio.Event()
        self._max_accepts_per_turn = _MAX_ACCEPTS_PER_TURN if heartbeat is None else 1
        self._connecting: set[asyncio.Task[Any]] = set()
        self._failed_accept = RateLimitedWarning()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections, a few at a time: an event loop's own server accepts all that wait at once,
        before the limit can apply.
        """
        self.servers = []
        for listener in sockets or ():
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting connections, and waits for the open ones."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener.fileno())
        await super().shutdown(sockets)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(self._max_accepts_per_turn):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another process accepted it, or the client has left
            except OSError as e:  # no descriptors are free; waiting connections are accepted later
                self._failed_accept.log("No connection can be accepted: %s", e)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener.fileno())
                loop.call_later(_ACCEPT_RETRY_SECONDS, self._resume_accepting, listener)
                return
            self._start_connection(connection)

    def _start_connection(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _resume_accepting(self, listener: socket.socket) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _protocol(self) -> asyncio.Protocol:
        return LimitedHttpProtocol(self.config, self.server_state, self.lifespan.state)

    def stop(self) -> None:
        """Ends `serve` when the open connections are closed."""
        self.should_exit = True
        self._stop_event.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signals: RunningServer does."""
        yield

    async def main_loop(self) -> None:
        """Updates the date in responses and sends heartbeats, until `stop` is called."""
        while not await self.on_tick(0):
            if self._heartbeat is not None:
                self._heartbeat()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_event.wait(), HEARTBEAT_INTERVAL_SECONDS)


class RunningServer:
    """An HTTP server that runs in the event loop, and the signals that end it.

    Args:
        listener: The listening socket.
        heartbeat, max_connections: As for HTTPServer.

    Attributes:
        signals: The numbers of those that have come. Of several SIGHUPs, which a terminal that closes sends, the first.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        heartbeat: Callable[[], None] | None = None,
        max_connections: int | None = None,
    ) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # clients cause them by sending invalid HTTP
        self._http = HTTPServer(app, heartbeat, max_connections or default_max_connections())
        self.signals: list[int] = []
        self._received = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in shutdown_signals():
            loop.add_signal_handler(number, self.on_signal, number)
        self._serving = loop.create_task(self._http.serve(sockets=[listener]))

    def on_signal(self, number: int) -> None:
        """Handles a signal that this process or its parent has received."""
        if number != signal.SIGHUP or not self.signals:
            self.signals.append(number)
            self._received.set()

    async def wait_for_signal(
        self, until: Callable[[], bool] = lambda: False, seconds: float = math.inf, poll_seconds: float = _POLL_SECONDS
    ) -> bool:
        """Waits for a signal, at most `seconds`, or until a condition holds; returns whether one has come."""
        deadline = time.monotonic() + seconds
        while not (self._received.is_set() or until()) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._received.wait(), min(left, poll_seconds))
        return self._received.is_set()

    async def drain(self, num_requests: Callable[[], int], timeout: float, is_dead: Callable[[], bool]) -> None:
        """Lets running requests finish: for `timeout` seconds, until a second signal, or until `is_dead`."""
        logger.info(
            "%s: no new requests are accepted; %d running requests may take %g s.",
            signal.Signals(self.signals[0]).name,
            num_requests(),
            timeout,
        )
        self._received.clear()
        await self.wait_for_signal(lambda: is_dead() or not num_requests(), timeout, _DRAIN_POLL_SECONDS)
        if num_requests() and not is_dead():
            logger.info("Aborting %d requests.", num_requests())

    async def stop(self) -> None:
        """Ends the server, when the last responses are sent."""
        self._http.stop()
        await asyncio.wait([self._serving], timeout=FINAL_RESPONSES_SECONDS)


class ServedApplication(Protocol):
    """What is behind an application: told when to start and when to end. All calls are in the event loop."""

    @property
    def num_requests(self) -> int:
        """Requests in progress. The shutdown waits for them."""

    async def start(self) -> None:
        """Called when the application can be reached. What goes on until the end runs in tasks."""

    def drain(self) -> None:
        """Called when the server shuts down: refuses new requests from now on."""

    async def close(self) -> None:
        """Called when no request is in progress any more or a second signal has come: aborts those that are left."""


async def serve_application(
    app: ASGIApp,
    served: ServedApplication,
    listener: socket.socket,
    settings: ServerSettings,
    metrics: HTTPMetrics,
    *,
    rate_limiter: RateLimiter | None = None,
    descriptors_per_request: int = 2,
    checks_origin: bool = True,
) -> int:
    """Serves until a signal ends the server; returns the exit status, 0.

    Args:
        app: The ASGI application. Its APIErrors and RequestErrors become responses in the format of the request's API.
        served: What is behind it.
        listener: The listening socket; the caller closes it.
        settings: Keys, allowed hosts and origins, the log of requests, and the time for the shutdown.
        metrics: Counts the responses.
        rate_limiter: Counts and refuses requests.
        descriptors_per_request: File descriptors that a request may need, its client's connection included. They limit
            the number of connections.
        checks_origin: False if servers behind the application check the origins of browsers' requests.
    """
    check = BrowserCheck.create(settings, listener, checks_origin=checks_origin)
    with_middleware = add_middleware(app, metrics, settings, rate_limiter, check)
    max_connections = default_max_connections() // descriptors_per_request
    server = RunningServer(with_middleware, listener, max_connections=max_connections)
    try:
        await served.start()
        await server.wait_for_signal()
        served.drain()
        await server.drain(lambda: served.num_requests, settings.shutdown_timeout, lambda: False)
    finally:
        force_exit_after(SHUTDOWN_SECONDS + settings.shutdown_timeout)
        await served.close()
        await server.stop()
    logger.info("Ended.")
    return 0
