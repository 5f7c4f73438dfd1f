"""The middleware of every request: normalized path, request id, authentication, origin, limits, access log and
metrics.

It is one ASGI layer instead of several, because each layer costs time for every chunk of every stream. A path needs a
key unless it is literally one of UNAUTHENTICATED_PATHS or `GET` of the chat page, so unusual spellings of these
need one, too.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mvllm.entrypoints.openai.common.api_format import APIFormat, error_response, set_api_format
from mvllm.entrypoints.openai.common.errors import APIError, to_api_error
from mvllm.entrypoints.openai.common.relaxation_header import RELAXATIONS_SCOPE_KEY, relaxations_header
from mvllm.entrypoints.openai.common.unknown_fields import UNKNOWN_FIELDS_SCOPE_KEY, unknown_fields_header
from mvllm.entrypoints.openai.server.authentication import APIKeys, Caller, Role
from mvllm.entrypoints.openai.server.browser_requests import BrowserCheck
from mvllm.entrypoints.openai.server.rate_limits import (
    RateLimiter,
    RunningRequest,
    response_headers,
    set_current_request,
)
from mvllm.logging import get_logger
from mvllm.multimodal.media_fetcher import current_client

logger = get_logger(__name__)

UNAUTHENTICATED_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
PAGE_PATH = "/"
"""The path of the chat page, which asks its user for the key that it sends, and holds nothing of the server's."""
_UNLOGGED_PATHS = UNAUTHENTICATED_PATHS | {"/metrics", "/ping", "/load"}
_SLASHES = re.compile("/{2,}")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

_UNAUTHENTICATED = Caller(Role.UNAUTHENTICATED)

ObserveRequest = Callable[[str, str, int, float], None]
"""Called for each response with the route's path, the method, the status and the seconds it took."""


class RequestMiddleware:
    """The ASGI middleware. See the module.

    Args:
        app: The application.
        keys: The API keys.
        observe: Called for each response.
        rate_limiter: Limits the requests of each key; None for no limits.
        browser_check: Checks requests without a key; None for no check.
        formats: The formats of APIs other than OpenAI's.
        has_page: Whether PAGE_PATH has the chat page, for which no key is needed.
        access_log: Whether to log method, path, status, time and request id of each response.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: APIKeys,
        observe: ObserveRequest,
        rate_limiter: RateLimiter | None = None,
        browser_check: BrowserCheck | None = None,
        formats: Sequence[APIFormat] = (),
        *,
        has_page: bool = False,
        access_log: bool = True,
    ) -> None:
        self._app = app
        self._rate_limiter = rate_limiter
        self._browser_check = browser_check
        self._formats = formats
        self._keys = keys
        self._observe = observe
        self._has_page = has_page
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            return  # lifespan and WebSockets are disabled
        start = time.perf_counter()
        method = scope["method"]
        if method == "HEAD":  # the headers of GET; the protocol knows by its own scope that there is no body
            scope = {**scope, "method": "GET"}
        path = scope["path"] = _normalize_path(scope["path"])
        request_id = scope["mvllm.request_id"] = _request_id(scope)
        id_headers = [(b"x-request-id", request_id.encode())]
        api_format = set_api_format(scope, self._formats)
        if api_format.request_id_header is not None:
            id_headers.append((api_format.request_id_header, request_id.encode()))
        status = 0
        unknown_fields: list[str] = []
        scope[UNKNOWN_FIELDS_SCOPE_KEY] = unknown_fields  # filled by UnknownFields
        relaxations: list[str] = []
        scope[RELAXATIONS_SCOPE_KEY] = relaxations  # filled by `set_relaxations`
        running: RunningRequest | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *id_headers, *response_headers(scope)]
                if unknown_fields:
                    message["headers"].append(unknown_fields_header(unknown_fields))
                if relaxations:
                    message["headers"].append(relaxations_header(relaxations))
            elif method == "HEAD" and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            caller = scope["mvllm.caller"] = self._authorize(scope["headers"], scope["method"], path)
            if self._rate_limiter is not None:
                running = self._rate_limiter.start(scope, caller)
            set_current_request(running)
            current_client.set(caller.key or (scope.get("client") or ("unknown",))[0])
            await self._app(scope, receive, send_with_id)
        except Exception as e:  # noqa: BLE001  (to_api_error logs it)
            error = to_api_error(e)
            if status == 0:
                await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            if running is not None:
                running.end()
            seconds = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", "other")
            self._observe(route, _known_method(method), status, seconds)
            if self._access_log and path not in _UNLOGGED_PATHS:
                shown = status or "left"
                logger.info('"%s %s" %s %.1f ms %s', method, _printable_path(path), shown, seconds * 1e3, request_id)

    def _authorize(self, headers: Iterable[tuple[bytes, bytes]], method: str, path: str) -> Caller:
        """The caller of a request.

        Raises:
            APIError: It has no valid key (401), or a page of another site has sent it (403).
        """
        caller = self._keys.authenticate(headers)
        if path not in UNAUTHENTICATED_PATHS:
            is_page = self._has_page and method == "GET" and path == PAGE_PATH
            if caller.role == Role.UNAUTHENTICATED and not is_page:
                raise APIError(
                    401,
                    "Send a valid API key: Authorization: Bearer <key>, or x-api-key: <key>.",
                    code="invalid_api_key",
                )
            if self._browser_check is not None and caller.key is None:
                self._browser_check.check(headers)
        return caller


def request_caller(scope: Scope) -> Caller:
    """The caller of a request, as RequestMiddleware has authenticated it."""
    caller: Caller = scope.get("mvllm.caller", _UNAUTHENTICATED)
    return caller


def require_admin(request: Request) -> None:
    """Checks that a request has an administrator's key.

    Raises:
        APIError: It has not (403).
    """
    if request_caller(request.scope).role < Role.ADMIN:
        raise APIError(
            403,
            "This route needs an administrator's key (--admin-api-key).",
            code="admin_key_required",
        )


def _normalize_path(path: str) -> str:
    """A path without double and trailing slashes, which some clients produce when they join URL and path."""
    path = _SLASHES.sub("/", path)
    return path.rstrip("/") or "/" if path.startswith("/") else "/" + path


def _request_id(scope: Scope) -> str:
    """The client's request id if it is short and printable, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return f"req-{uuid.uuid4().hex}"


def _printable_path(path: str) -> str:
    """A path for the log: shortened, with control characters escaped."""
    return ascii(path[:200])[1:-1]


def _known_method(method: str) -> str:
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
