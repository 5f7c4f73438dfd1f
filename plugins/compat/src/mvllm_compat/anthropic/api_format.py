"""Errors and models in the format of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from starlette.types import Scope

from mvllm.extension_api import APIError
from mvllm.extension_api.http import APIFormat, encode_json
from mvllm_compat.anthropic.response_types import AnthropicModel, AnthropicModelList

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TEXT_FIELD = {"type": "string"}


class AnthropicFormat(APIFormat):
    """Of requests to `/v1/messages`, and of those with the header `anthropic-version`, which its clients send always.

    Errors are `{"type": "error", "error": {"type", "message"}, "request_id"}`.
    """

    error_name = "AnthropicError"
    error_schema: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT_FIELD, "message": _TEXT_FIELD},
            },
            "request_id": {"type": ["string", "null"]},
        },
    }
    request_id_header = b"request-id"

    model_type: ClassVar[Any] = AnthropicModel
    model_list_type: ClassVar[Any] = AnthropicModelList

    def matches(self, scope: Scope) -> bool:
        """See APIFormat."""
        path: str = scope["path"]
        if path == "/v1/messages" or path.startswith("/v1/messages/"):
            return True
        return any(name == b"anthropic-version" for name, _ in scope["headers"])

    def error_body(self, error: APIError, request_id: str | None = None) -> bytes:
        """See APIFormat. The message names the field."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        message = error.message.encode(errors="backslashreplace").decode()
        if error.param is not None and error.param not in message:
            message = f"{error.param.encode(errors='backslashreplace').decode()}: {message}"
        return encode_json({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})

    def error_event(self, error: APIError, request_id: str | None = None) -> bytes:
        """See APIFormat."""
        return b"event: error\ndata: " + self.error_body(error, request_id) + b"\n\n"

    def model(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """See APIFormat."""
        return {
            "type": "model",
            "id": card["id"],
            "display_name": card["id"],
            "created_at": datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": card["max_model_len"],
            "max_tokens": card["max_model_len"],
        }

    def model_list(self, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """See APIFormat. It is one page."""
        data = [self.model(card) for card in cards]
        return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
