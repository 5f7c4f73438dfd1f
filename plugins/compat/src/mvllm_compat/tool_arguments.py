"""Arguments of tool calls as objects, for APIs that have no JSON text there."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID_JSON = "INVALID_JSON"
"""The only key of arguments that are not a JSON object; its value is their text."""


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call. A text that is not a JSON object, such as a truncated one, becomes a value."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return {INVALID_JSON: text}
    return value if isinstance(value, dict) else {INVALID_JSON: text}
