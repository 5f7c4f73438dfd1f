"""Renders a conversation to the text that the model was trained to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mvllm.engine.tokenizer import Tokenizer
from mvllm.errors import RequestError

_RESERVED = (
    "tokenize",
    "conversation",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template",
    "return_tensors",
    "return_dict",
)


Conversation = Sequence[Mapping[str, Any]]
"""Messages of `role` and `content`, a text or a list of text parts; templates may know further keys."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Conversation,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation, special tokens included: tokenize it without adding any.

    Args:
        chat_template: A Jinja template in place of the tokenizer's own.
        add_generation_prompt: End with the beginning of an answer.
        continue_final_message: Leave the last message open, for the model to go on with it.
        tools: Functions that the model may call, as JSON schemas.
        chat_template_kwargs: Further variables for the template.

    Raises:
        RequestError: The conversation or the settings are not acceptable, there is no template, or it failed.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message leaves the last message open, which add_generation_prompt would close; "
            "pass add_generation_prompt=False with it.",
            parameter="continue_final_message",
        )
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise RequestError(
            f"chat_template_kwargs must be a dict; found a {type(chat_template_kwargs).__name__}.",
            parameter="chat_template_kwargs",
        )
    extra = dict(chat_template_kwargs or {})
    reserved = [name for name in extra if name in _RESERVED]
    if reserved:
        raise RequestError(f"chat_template_kwargs may not set {', '.join(reserved)}.", parameter="chat_template_kwargs")
    if chat_template is None and getattr(tokenizer.hf, "chat_template", None) is None:
        raise RequestError(
            "The model's tokenizer has no chat template, so a conversation cannot be turned into a prompt. "
            "Pass chat_template=..., or use generate() with a prompt of your own.",
            parameter="chat_template",
        )
    given: object = messages
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(
            f"A conversation is a list of messages; found a {type(messages).__name__}.", parameter="messages"
        )
    if not messages:
        raise RequestError("The conversation has no messages.", parameter="messages")
    conversation = [_check_message(i, message) for i, message in enumerate(messages)]
    try:
        text = tokenizer.hf.apply_chat_template(
            conversation,
            tools=list(tools) if tools else None,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **extra,
        )
    except Exception as e:
        raise RequestError(f"The chat template failed: {type(e).__name__}: {e}", parameter="messages") from e
    return str(text)


def is_conversation(value: object) -> bool:
    """Whether `value` is one conversation, not a list of them."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(m, Mapping) for m in value)


def _check_message(i: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"Message {i} must be a dict with 'role' and 'content'; found a {type(message).__name__}.",
            parameter="messages",
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"Message {i} needs a 'role' such as 'user'; found {role!r}.", parameter="messages")
    checked = dict(message)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        checked["content"] = _join_parts(i, content)
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"The content of message {i} must be a text or a list of text parts; found a {type(content).__name__}.",
            parameter="messages",
        )
    elif content is None and not set(message) - {"role", "content"}:
        raise RequestError(f"Message {i} has no 'content'.", parameter="messages")
    return checked


def _join_parts(i: int, parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"Message {i} has a part of type {kind!r}; this model takes only text parts.", parameter="messages"
            )
        texts.append(part["text"])
    return "\n".join(texts)
