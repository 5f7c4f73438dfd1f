"""Chat templates that read the content of a message as a list of parts, not as a text."""

from __future__ import annotations

import re
from typing import Any

_LOOP = re.compile(r"\bin\s+\w+\s*(?:\.\s*content\b|\[\s*['\"]content['\"]\s*\])")
_TEXT_TEST = re.compile(r"\bstring\b")


def expects_content_parts(template: str) -> bool:
    """Whether a template loops over the parts of a message's content, without a case for texts."""
    return _LOOP.search(template) is not None and _TEXT_TEST.search(template) is None


def with_content_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as the only part of its content."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
