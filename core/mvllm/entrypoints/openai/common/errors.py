"""Errors of HTTP responses. `api_format.py` has the formats of APIs other than OpenAI's.

A response has the text of RequestErrors and APIErrors, which are written for clients. Every other exception is logged,
and its response is a general 500.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping

import msgspec

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

_PROMPTS = ("prompt", "input", "messages")


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


_JSON_WORDS = {"True": "true", "False": "false", "None": "null", "a dict": "an object"}
_PYTHON_WORDS = re.compile(rf"(?<![\w'\"])(?:{'|'.join(_JSON_WORDS)})(?![\w'\"])")


def to_api_error(error: BaseException) -> APIError:
    """The error that a client gets for an exception. Logs exceptions whose text it does not get."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if "max_model_len" in str(error) and error.parameter in _PROMPTS else None
        return APIError(400, in_json(str(error)), param=error.parameter, code=code)
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


def in_json(message: str) -> str:
    """A message with JSON's words for values where it has Python's, except in quoted texts."""
    return _PYTHON_WORDS.sub(lambda match: _JSON_WORDS[match[0]], message)


@contextlib.contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the fields in errors, for example from those of the chat completion request to those of another API.

    Args:
        names: The other name of each field that differs.
    """
    try:
        yield
    except RequestError as e:
        if e.parameter is None or e.parameter not in names:
            raise
        raise RequestError(str(e), parameter=names[e.parameter]) from e
