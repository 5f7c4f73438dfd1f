"""Errors and models in the format of Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.types import Scope

from mvllm.extension_api import APIError
from mvllm.extension_api.http import APIFormat, encode_json
from mvllm_compat.ollama.models import list_entry


class OllamaFormat(APIFormat):
    """Of requests to `/api/...`. Errors are `{"error": "message"}`."""

    error_name = "OllamaError"
    error_schema: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    }

    def matches(self, scope: Scope) -> bool:
        """See APIFormat."""
        path: str = scope["path"]
        return path.startswith("/api/")

    def error_body(self, error: APIError, request_id: str | None = None) -> bytes:
        """See APIFormat."""
        return encode_json({"error": error.message.encode(errors="backslashreplace").decode()})

    def error_event(self, error: APIError, request_id: str | None = None) -> bytes:
        """See APIFormat: a line of JSON."""
        return self.error_body(error) + b"\n"

    def model(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """The response of `/api/show` for a model of which only the card is known."""
        entry = list_entry(card, None, card.get("size", 0))
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": entry["details"],
            "model_info": {},
            "capabilities": ["completion"],
            "modified_at": entry["modified_at"],
        }

    def model_list(self, cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The response of `/api/tags` for models of which only the cards are known."""
        return {"models": [list_entry(card, None, card.get("size", 0)) for card in cards]}
