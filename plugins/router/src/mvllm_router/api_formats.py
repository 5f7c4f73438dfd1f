"""Entries of lists of models in the formats of other APIs than OpenAI's, for models that may not be loaded.

The router forwards all other requests of these APIs to model servers, as far as they have the routes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

OLLAMA_DEFAULT_TAG = ":latest"
"""Clients of Ollama add it to names without a tag."""

OLLAMA_LOAD_HEADER = b"x-mvllm-load-nanoseconds"
"""Header by which a model server learns for how long a request has waited for its model."""


def ollama_entry(card: Mapping[str, Any], size: int) -> dict[str, Any]:
    """An entry of `/api/tags` of a model that has never been loaded: what only its files say is empty.

    Args:
        card: The entry of `/v1/models`.
        size: Bytes of the weights.
    """
    name = card["id"] if ":" in card["id"] else card["id"] + OLLAMA_DEFAULT_TAG
    return {
        "name": name,
        "model": name,
        "modified_at": _time(card),
        "size": size,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {
            "parent_model": card.get("parent") or "",
            "format": "",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def anthropic_model(card: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `/v1/models` in Anthropic's format.

    Args:
        card: The entry in OpenAI's format.
    """
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": _time(card),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def anthropic_models(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The response of `/v1/models` in Anthropic's format. It is one page."""
    data = [anthropic_model(card) for card in cards]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def _time(card: Mapping[str, Any]) -> str:
    return datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
