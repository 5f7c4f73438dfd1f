"""Runs `mvllm router`. After the first signal running requests finish; a second signal aborts them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, ProcessCollector

from mvllm.extension_api import get_logger
from mvllm.extension_api.server import (
    HTTPMetrics,
    ServerSettings,
    listener_url,
    run_in_event_loop,
    serve_application,
)
from mvllm_router.prefill_decode_app import PrefillDecodeApp
from mvllm_router.remote_server import RemoteServer

logger = get_logger(__name__)


def run_prefill_decode_router(
    prefill: Sequence[RemoteServer],
    decode: Sequence[RemoteServer],
    settings: ServerSettings,
    prefill_timeout: float,
    listener: socket.socket,
) -> int:
    """Serves until a signal ends the router; returns the exit status, 0.

    Args:
        prefill, decode, prefill_timeout: See PrefillDecodeApp.
        listener: The listening socket; the caller closes it.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = HTTPMetrics(registry)
    app = PrefillDecodeApp(prefill, decode, settings, prefill_timeout, metrics)
    served = _Router(app, prefill, decode, listener)
    serving = serve_application(
        app,
        served,
        listener,
        settings,
        metrics,
        descriptors_per_request=3,  # with two connections to engines
        checks_origin=False,  # the engines know which are allowed
    )
    return run_in_event_loop(serving)


class _Router:
    """What is behind the application: a ServedApplication."""

    def __init__(
        self,
        app: PrefillDecodeApp,
        prefill: Sequence[RemoteServer],
        decode: Sequence[RemoteServer],
        listener: socket.socket,
    ) -> None:
        self._app = app
        self._prefill, self._decode = prefill, decode
        self._listener = listener

    @property
    def num_requests(self) -> int:
        return self._app.num_requests

    async def start(self) -> None:
        logger.info(
            "Ready at %s; prefill engines: %s; decode engines: %s.",
            listener_url(self._listener),
            ", ".join(server.url for server in self._prefill),
            ", ".join(server.url for server in self._decode),
        )

    def drain(self) -> None:
        self._app.is_draining = True

    async def close(self) -> None:
        for server in (*self._prefill, *self._decode):
            server.close()
