"""For packages with a server of their own, such as a router: the HTTP of `mvllm serve` for another application."""

from __future__ import annotations

from mvllm.config.cached_models import list_cached_models as list_cached_models
from mvllm.config.cached_models import list_models_in as list_models_in
from mvllm.config.engine_args import EngineArgs as EngineArgs
from mvllm.config.hub import DEMO as DEMO
from mvllm.config.hub import find_model as find_model
from mvllm.engine.async_llm import AsyncLLM as AsyncLLM
from mvllm.engine.metrics.prometheus import cumulative_buckets as cumulative_buckets
from mvllm.engine.metrics.stats import Histogram as Histogram
from mvllm.entrypoints.event_loop import run_in_event_loop as run_in_event_loop
from mvllm.entrypoints.openai.common.api_format import APIFormat as APIFormat
from mvllm.entrypoints.openai.common.api_format import api_format as api_format
from mvllm.entrypoints.openai.common.api_router import APIRouter as APIRouter
from mvllm.entrypoints.openai.common.json_response import json_response as json_response
from mvllm.entrypoints.openai.common.load_header import LOAD_HEADER as LOAD_HEADER
from mvllm.entrypoints.openai.common.request_body import BodyDecoder as BodyDecoder
from mvllm.entrypoints.openai.common.request_body import BodyReader as BodyReader
from mvllm.entrypoints.openai.common.streaming_response import CLIENT_CLOSED_REQUEST as CLIENT_CLOSED_REQUEST
from mvllm.entrypoints.openai.common.streaming_response import ClientDisconnected as ClientDisconnected
from mvllm.entrypoints.openai.common.streaming_response import RequestConnection as RequestConnection
from mvllm.entrypoints.openai.common.streaming_response import cancel_on_disconnect as cancel_on_disconnect
from mvllm.entrypoints.openai.common.streaming_response import stream_format as stream_format
from mvllm.entrypoints.openai.server.api_server import require_tokenizer as require_tokenizer
from mvllm.entrypoints.openai.server.api_server import run_server as run_server
from mvllm.entrypoints.openai.server.api_server import warn_if_public as warn_if_public
from mvllm.entrypoints.openai.server.app import build_app_without_engine as build_app_without_engine
from mvllm.entrypoints.openai.server.authentication import Role as Role
from mvllm.entrypoints.openai.server.browser_requests import is_same_origin as is_same_origin
from mvllm.entrypoints.openai.server.heartbeat_monitor import HeartbeatMonitor as HeartbeatMonitor
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics as HTTPMetrics
from mvllm.entrypoints.openai.server.http_server import serve_application as serve_application
from mvllm.entrypoints.openai.server.listener import listener_url as listener_url
from mvllm.entrypoints.openai.server.listener import open_listener as open_listener
from mvllm.entrypoints.openai.server.middleware import request_caller as request_caller
from mvllm.entrypoints.openai.server.middleware import require_admin as require_admin
from mvllm.entrypoints.openai.server.rate_limits import KeyCounters as KeyCounters
from mvllm.entrypoints.openai.server.rate_limits import RateLimiter as RateLimiter
from mvllm.entrypoints.openai.server.settings import ServerSettings as ServerSettings
from mvllm.entrypoints.openai.server.shared_metrics import SharedServerMetrics as SharedServerMetrics
from mvllm.entrypoints.root_plugins import hold_plugins as hold_plugins
from mvllm.entrypoints.root_plugins import loaded_plugins as loaded_plugins
from mvllm.entrypoints.root_plugins import model_options as model_options
from mvllm.errors import CacheError as CacheError
from mvllm.errors import StepMemoryError as StepMemoryError

__all__ = [
    "CLIENT_CLOSED_REQUEST",
    "DEMO",
    "LOAD_HEADER",
    "APIFormat",
    "APIRouter",
    "AsyncLLM",
    "BodyDecoder",
    "BodyReader",
    "CacheError",
    "ClientDisconnected",
    "EngineArgs",
    "HTTPMetrics",
    "HeartbeatMonitor",
    "Histogram",
    "KeyCounters",
    "RateLimiter",
    "RequestConnection",
    "Role",
    "ServerSettings",
    "SharedServerMetrics",
    "StepMemoryError",
    "api_format",
    "build_app_without_engine",
    "cancel_on_disconnect",
    "cumulative_buckets",
    "find_model",
    "is_same_origin",
    "hold_plugins",
    "json_response",
    "list_cached_models",
    "list_models_in",
    "listener_url",
    "loaded_plugins",
    "model_options",
    "open_listener",
    "request_caller",
    "require_admin",
    "require_tokenizer",
    "run_in_event_loop",
    "run_server",
    "serve_application",
    "stream_format",
    "warn_if_public",
]
