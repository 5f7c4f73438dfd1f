"""Runs `mvllm router`. After the first signal running requests finish; a second signal aborts them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector

from mvllm.entrypoints.event_loop import run_in_event_loop
from mvllm.entrypoints.openai.server.api_server import HTTPServer
from mvllm.entrypoints.openai.server.app import add_middleware
from mvllm.entrypoints.openai.server.browser_requests import BrowserCheck
from mvllm.entrypoints.openai.server.connections import ConnectionTable, default_max_connections
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_protocol import uvicorn_settings
from mvllm.entrypoints.openai.server.listener import listener_url
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.router.prefill_decode_app import PrefillDecodeApp
from mvllm.entrypoints.router.remote_server import RemoteServer
from mvllm.entrypoints.shutdown_signals import SHUTDOWN_SECONDS, force_exit_after, shutdown_signals
from mvllm.logging import get_logger

logger = get_logger(__name__)

_POLL_SECONDS = 0.1
_FINAL_RESPONSES_SECONDS = 5.0


def run_prefill_decode_router(
    prefill: list[RemoteServer],
    decode: list[RemoteServer],
    settings: ServerSettings,
    prefill_timeout: float,
    listener: socket.socket,
) -> int:
    """Serves until a signal ends the router; returns the exit status, 0.

    Args:
        prefill, decode, prefill_timeout: See PrefillDecodeApp.
        listener: The listening socket; the caller closes it.
    """
    return run_in_event_loop(_run(prefill, decode, settings, prefill_timeout, listener))


async def _run(
    prefill: list[RemoteServer],
    decode: list[RemoteServer],
    settings: ServerSettings,
    prefill_timeout: float,
    listener: socket.socket,
) -> int:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = HTTPMetrics(registry)
    app = PrefillDecodeApp(prefill, decode, settings, prefill_timeout, metrics.exposition)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # clients cause them by sending invalid HTTP
    check = BrowserCheck.create(settings, listener, checks_origin=False)  # the engines know which are allowed
    served = add_middleware(app, metrics, settings, browser_check=check)
    config = uvicorn.Config(app=served, timeout_graceful_shutdown=2, **uvicorn_settings())
    http = HTTPServer(config, is_shared=False, heartbeat=lambda: None)
    http.server_state = ConnectionTable(default_max_connections() // 3)  # each may have two to engines, too
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
    logger.info(
        "Ready at %s; prefill engines: %s; decode engines: %s.",
        listener_url(listener),
        ", ".join(server.url for server in prefill),
        ", ".join(server.url for server in decode),
    )
    try:
        await received.wait()
        app.is_draining = True
        logger.info("%s: %d running requests may finish.", signal.Signals(signals[0]).name, app.num_requests)
        received.clear()
        deadline = time.monotonic() + settings.shutdown_timeout
        while app.num_requests and time.monotonic() < deadline and not received.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(received.wait(), _POLL_SECONDS)
    finally:
        force_exit_after(SHUTDOWN_SECONDS + settings.shutdown_timeout)
        http.stop()
        await asyncio.wait([serving], timeout=_FINAL_RESPONSES_SECONDS)
        for server in (*prefill, *decode):
            server.close()
    logger.info("Ended.")
    return 0
