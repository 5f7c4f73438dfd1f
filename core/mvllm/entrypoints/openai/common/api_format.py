"""The formats of APIs: how errors and models look to a client, by the path and the headers of its request.

The server's own format is OpenAI's. HTTP plugins bring those of other APIs (`HTTPPlugin.formats`); RequestMiddleware
finds the format of each request and notes it in the ASGI scope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Scope

from mvllm.entrypoints.openai.common.errors import APIError, error_body
from mvllm.entrypoints.openai.common.server_sent_events import error_event

API_FORMAT_SCOPE_KEY = "mvllm.api_format"
"""Key of an ASGI scope with the request's APIFormat."""

_TEXT_FIELD = {"type": "string"}
_NULLABLE_TEXT_FIELD = {"type": ["string", "null"]}


class APIFormat:
    """The format of one API. This class is OpenAI's; those of other APIs override all methods that differ.

    Attributes:
        error_name: Name of the schema of errors in the description of the API.
        error_schema: JSON schema of an error's body.
        request_id_header: A header in which clients of the API expect the request's id, besides `x-request-id`; None
            for none.
        model_type, model_list_type: Types of one model and of the list of models, for the description of the API; None
            for those of OpenAI.
    """

    error_name: ClassVar[str] = "Error"
    error_schema: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT_FIELD,
                    "type": _TEXT_FIELD,
                    "param": _NULLABLE_TEXT_FIELD,
                    "code": _NULLABLE_TEXT_FIELD,
                },
            }
        },
    }
    request_id_header: ClassVar[bytes | None] = None
    model_type: ClassVar[Any] = None
    model_list_type: ClassVar[Any] = None

    def matches(self, scope: Scope) -> bool:
        """Whether a request is one of this API. Called for every request; `scope["path"]` is normalized."""
        return False

    def error_body(self, error: APIError, request_id: str | None = None) -> bytes:
        """The body of an error response, JSON."""
        return error_body(error.status, error.message, param=error.param, code=error.code)

    def error_event(self, error: APIError, request_id: str | None = None) -> bytes:
        """What ends a stream that has failed, in the format of the API's streams."""
        return error_event(error)

    def model(self, card: Mapping[str, Any]) -> Mapping[str, Any]:
        """One model.

        Args:
            card: As OpenAI's API describes it. `size`, the bytes of its weights, may be among the fields.
        """
        return card

    def model_list(self, cards: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The response to a request for the list of models."""
        return {"object": "list", "data": cards}


OPENAI = APIFormat()


def find_format(formats: Sequence[APIFormat], scope: Scope) -> APIFormat:
    """The format of a request: the first that matches, or OpenAI's."""
    for each in formats:
        if each.matches(scope):
            return each
    return OPENAI


def set_api_format(scope: Scope, formats: Sequence[APIFormat]) -> APIFormat:
    """Finds the format of a request and notes it in its scope, for `api_format` and `error_response`."""
    found = scope[API_FORMAT_SCOPE_KEY] = find_format(formats, scope)
    return found


def api_format(scope: Scope) -> APIFormat:
    """The format of a request, as RequestMiddleware has found it."""
    found: APIFormat = scope.get(API_FORMAT_SCOPE_KEY, OPENAI)
    return found


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
    scope = scope or {}
    body = api_format(scope).error_body(error, scope.get("mvllm.request_id"))
    return Response(body, error.status, headers, "application/json")
