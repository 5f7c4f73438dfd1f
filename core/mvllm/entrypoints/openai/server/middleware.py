"""What every request passes on its way in and out: its path made plain, its id, its key, its line in the log.

The idea: one ASGI layer around the application, and only one, since each costs every piece of every stream. A key is
asked for unless the path is literally one of the few that are open, so a path that is odd in any way needs one.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mvllm.entrypoints.openai.common.errors import APIError, error_response, to_api_error
from mvllm.entrypoints.openai.common.unknown_fields import UNKNOWN_FIELDS_SCOPE_KEY, unknown_fields_header
from mvllm.entrypoints.openai.server.authentication import APIKeys, Caller, Role
from mvllm.logging import get_logger

logger = get_logger(__name__)

UNAUTHENTICATED_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
_UNLOGGED_PATHS = UNAUTHENTICATED_PATHS | {"/metrics", "/ping", "/load"}
_SLASHES = re.compile("/{2,}")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

_UNAUTHENTICATED = Caller(Role.UNAUTHENTICATED)

ObserveRequest = Callable[[str, str, int, float], None]
"""Told of each answer: the route's path, the method, the status, and the seconds it took."""


class RequestMiddleware:
    """The outermost layer of the server.

    Args:
        app: What is inside.
        keys: Who may enter.
        observe: Told of every answer.
        access_log: Whether each answer gets a line: method, path, status, time and request id, never a content.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys, observe: ObserveRequest, *, access_log: bool = True) -> None:
        self._app = app
        self._keys = keys
        self._observe = observe
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return  # lifespan and WebSockets are switched off
        start = time.perf_counter()
        path = scope["path"] = _normalize_path(scope["path"])
        request_id = _request_id(scope)
        id_header = (b"x-request-id", request_id.encode())
        status = 0
        unknown_fields: list[str] = []
        scope[UNKNOWN_FIELDS_SCOPE_KEY] = unknown_fields  # filled where the body is decoded

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
                if unknown_fields:
                    message["headers"].append(unknown_fields_header(unknown_fields))
            await send(message)

        try:
            caller = scope["mvllm.caller"] = self._keys.authenticate(scope["headers"])
            if caller.role == Role.UNAUTHENTICATED and path not in UNAUTHENTICATED_PATHS:
                raise APIError(401, "Send a valid API key: Authorization: Bearer <key>.", code="invalid_api_key")
            await self._app(scope, receive, send_with_id)
        except Exception as e:  # noqa: BLE001  (logged where it is not an answer)
            error = to_api_error(e)
            if status == 0:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", "other")
            self._observe(route, _known_method(scope["method"]), status, seconds)
            if self._access_log and path not in _UNLOGGED_PATHS:
                shown = status or "left"
                logger.info(
                    '"%s %s" %s %.1f ms %s', scope["method"], _printable_path(path), shown, seconds * 1e3, request_id
                )


def request_caller(scope: Scope) -> Caller:
    """Who has sent a request, as the gate has found."""
    caller: Caller = scope.get("mvllm.caller", _UNAUTHENTICATED)
    return caller


def require_admin(request: Request) -> None:
    """Refuses a request without the key of an administrator.

    Raises:
        APIError: It has none (403).
    """
    if request_caller(request.scope).role < Role.ADMIN:
        raise APIError(
            403,
            "This needs the key of an administrator (--admin-api-key).",
            code="admin_key_required",
        )


def _normalize_path(path: str) -> str:
    """A path without double slashes and without one at its end: clients join base and path in every way."""
    path = _SLASHES.sub("/", path)
    return path.rstrip("/") or "/" if path.startswith("/") else "/" + path


def _request_id(scope: Scope) -> str:
    """The client's own id where it is fit for a log, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return f"req-{uuid.uuid4().hex}"


def _printable_path(path: str) -> str:
    """A path that cannot disturb the log, whatever it holds."""
    return ascii(path[:200])[1:-1]


def _known_method(method: str) -> str:
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"
