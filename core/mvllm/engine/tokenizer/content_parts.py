"""Chat templates that read the content of a message as a list of parts, not as a text; prompts of one message."""

from __future__ import annotations

import re
from typing import Any

from mvllm.engine.tokenizer.tokenizer import Tokenizer

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


def render_user_message(tokenizer: Tokenizer, text: str) -> str | None:
    """A conversation of one message, as text that ends with the header of the answer; None without a chat template.

    Raises:
        RequestError: The template failed.
    """
    renderer = tokenizer.template_renderer
    if getattr(renderer, "chat_template", None) is None:
        return None
    message = {"role": "user", "content": text}
    try:
        found = renderer.get_chat_template(None, None)
        if expects_content_parts(str(found)):
            message = with_content_parts(message)
        return str(
            renderer.apply_chat_template([message], chat_template=None, add_generation_prompt=True, tokenize=False)
        )
    except Exception as e:
        from mvllm.engine.tokenizer.jinja_template import template_error

        raise template_error(e, "", parameter="prompt") from e
