"""Errors of HTTP responses, in the format of the API that the request addresses.

    OpenAI      {"error": {"message", "type", "param", "code"}}
    Anthropic   {"type": "error", "error": {"type", "message"}, "request_id"}
    Ollama      {"error": "message"}

A response has the text of RequestErrors and APIErrors, which are written for clients. Every other exception is logged,
and its response is a general 500.
"""

from __future__ import annotations

import enum
import math

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from mvllm.errors import EngineDeadError, QueueFullError, RequestError, UnavailableError
from mvllm.logging import get_logger

logger = get_logger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_PROMPTS = ("prompt", "input", "messages")


class ErrorFormat(enum.Enum):
    """The formats of errors. See the module."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"

    @classmethod
    def of_request(cls, scope: Scope) -> ErrorFormat:
        """The format for a request, by its path and its headers. The path is normalized."""
        path = scope["path"]
        if path.startswith("/api/"):
            return cls.OLLAMA
        if path == "/v1/messages" or path.startswith("/v1/messages/") or is_anthropic_client(scope):
            return cls.ANTHROPIC
        return cls.OPENAI


def is_anthropic_client(scope: Scope) -> bool:
    """Whether a request has the header `anthropic-version`, which every client of that API sends."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


class APIError(Exception):
    """An error with the response that it becomes.

    Args:
        status: HTTP status.
        message: For the client.
        param: The field of the request that caused it.
        code: Identifies the error for programs.
        retry_after: Seconds after which a client should try again.
        close: Whether to close the connection, because its request was not read to the end.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.close = close


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The body of an error response."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    clean = message.encode(errors="backslashreplace").decode()
    return msgspec.json.encode({"error": {"message": clean, "type": kind, "param": param, "code": code}})


def anthropic_error_body(error: APIError, request_id: str | None = None) -> bytes:
    """The body of an error response in Anthropic's format. The message names the field."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message.encode(errors="backslashreplace").decode()
    if error.param is not None and error.param not in message:
        message = f"{error.param.encode(errors='backslashreplace').decode()}: {message}"
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    return msgspec.json.encode(body)


def ollama_error_body(error: APIError) -> bytes:
    """The body of an error response in Ollama's format."""
    return msgspec.json.encode({"error": error.message.encode(errors="backslashreplace").decode()})


def to_api_error(error: BaseException) -> APIError:
    """The error that a client gets for an exception. Logs exceptions whose text it does not get."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if "max_model_len" in str(error) and error.parameter in _PROMPTS else None
        return APIError(400, str(error), param=error.parameter, code=code)
    if isinstance(error, UnavailableError):
        retry_after = math.ceil(error.retry_after)
        if isinstance(error, QueueFullError):
            return APIError(429, str(error), code="queue_full", retry_after=retry_after)
        return APIError(503, str(error), code="unavailable", retry_after=retry_after)
    if isinstance(error, EngineDeadError):
        return APIError(500, "The engine has stopped; the server is shutting down.", code="engine_dead")
    if isinstance(error, RecursionError):  # a body that could be decoded may still nest too deeply to be encoded
        logger.warning("A request was rejected: it is nested too deeply.", exc_info=error)
        return APIError(400, "The body is nested too deeply.")
    logger.error("A request failed.", exc_info=error)
    return APIError(500, "An internal error occurred; see the server's log.", code="internal_error")


def error_response(error: APIError, scope: Scope | None = None) -> Response:
    """The error as a response.

    Args:
        scope: ASGI scope of the request, which has the format; without it, the format is OpenAI's.
    """
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.close:
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    match ErrorFormat.OPENAI if scope is None else ErrorFormat.of_request(scope):
        case ErrorFormat.ANTHROPIC:
            body = anthropic_error_body(error, (scope or {}).get("mvllm.request_id"))
        case ErrorFormat.OLLAMA:
            body = ollama_error_body(error)
        case _:
            body = error_body(error.status, error.message, param=error.param, code=error.code)
    return Response(body, error.status, headers, "application/json")
