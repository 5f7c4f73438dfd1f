"""Serves an application with the HTTP of the server: its protocol and limits, keys, log, metrics, and orderly shutdown.

For applications beside the API server of a model, such as a router. After the first SIGTERM, SIGINT or SIGHUP running
requests finish; a second signal aborts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from mvllm.entrypoints.openai.server.api_server import HTTPServer
from mvllm.entrypoints.openai.server.app import add_middleware
from mvllm.entrypoints.openai.server.browser_requests import BrowserCheck
from mvllm.entrypoints.openai.server.connections import ConnectionTable, default_max_connections
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_protocol import uvicorn_settings
from mvllm.entrypoints.openai.server.rate_limits import RateLimiter
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.shutdown_signals import SHUTDOWN_SECONDS, force_exit_after, shutdown_signals
from mvllm.logging import get_logger

logger = get_logger(__name__)

_POLL_SECONDS = 0.1
_FINAL_RESPONSES_SECONDS = 5.0


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
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # clients cause them by sending invalid HTTP
    check = BrowserCheck.create(settings, listener, checks_origin=checks_origin)
    with_middleware = add_middleware(app, metrics, settings, rate_limiter, check)
    config = uvicorn.Config(app=with_middleware, timeout_graceful_shutdown=2, **uvicorn_settings())
    http = HTTPServer(config, is_shared=False, heartbeat=lambda: None)
    http.server_state = ConnectionTable(default_max_connections() // descriptors_per_request)
    signals: list[int] = []
    received = asyncio.Event()

    def on_signal(number: int) -> None:
        if number != signal.SIGHUP or not signals:  # a terminal that closes sends several
            signals.append(number)
            received.set()

    loop = asyncio.get_running_loop()
    for number in shutdown_signals():
        loop.add_signal_handler(number, on_signal, number)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        await served.start()
        await received.wait()
        received.clear()
        served.drain()
        timeout = settings.shutdown_timeout
        logger.info(
            "%s: no new requests are accepted; %d running requests may take %g s.",
            signal.Signals(signals[0]).name,
            served.num_requests,
            timeout,
        )
        deadline = time.monotonic() + timeout
        while served.num_requests and time.monotonic() < deadline and not received.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(received.wait(), _POLL_SECONDS)
        if served.num_requests:
            logger.info("Aborting %d requests.", served.num_requests)
    finally:
        force_exit_after(SHUTDOWN_SECONDS + settings.shutdown_timeout)
        await served.close()
        http.stop()
        await asyncio.wait([serving], timeout=_FINAL_RESPONSES_SECONDS)
    logger.info("Ended.")
    return 0
