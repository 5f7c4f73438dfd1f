"""Runs `mvllm router`. After the first signal running requests finish; a second signal aborts them."""

from __future__ import annotations

import socket

from prometheus_client import CollectorRegistry, ProcessCollector

from mvllm.extension_api.server import HTTPMetrics, ServerSettings, run_in_event_loop, serve_application
from mvllm_router.prefill_decode_app import PrefillDecodeApp
from mvllm_router.remote_server import RemoteServer


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
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = HTTPMetrics(registry)
    app = PrefillDecodeApp(prefill, decode, settings, prefill_timeout, metrics, listener)
    return run_in_event_loop(
        serve_application(
            app,
            app,
            listener,
            settings,
            metrics,
            descriptors_per_request=3,  # with two connections to engines
            checks_origin=False,  # the engines know which are allowed
        )
    )
