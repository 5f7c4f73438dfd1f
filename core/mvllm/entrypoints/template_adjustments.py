"""Adjusts a conversation to a chat template that cannot render it as clients send it.

the template                                          the conversation instead
does not mention the role developer                   role system
renders only the first call of a message              a message for each call, followed by its result
loops over the parts of a content, never a text       a text is a list of one part
fails: a function has no description                  an empty description
fails: a message may have only one call               a message for each call, followed by its result
fails: ids of calls must have nine characters         other ids
fails: no content and reasoning beside a call         the content at the end of the reasoning
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mvllm.engine.tokenizer.content_parts import expects_content_parts, with_content_parts

Message = dict[str, Any]
Tools = list[dict[str, Any]]

_FIRST_CALL = re.compile(r"\btool_calls\s*\[\s*0\s*\]")
_EVERY_CALL = re.compile(r"\bin\s+\w+(?:\.|\[\s*['\"])tool_calls\b")
_CALL_ID_LENGTH = 9


def adjust_to_template(messages: list[Message], template: str) -> list[Message]:
    """The messages that a template renders completely. The argument is not modified.

    Args:
        template: Text of the template; empty if unknown, in which case nothing is adjusted.
    """
    if not template:
        return messages
    if "developer" not in template:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    if _FIRST_CALL.search(template) and not _EVERY_CALL.search(template):
        messages = one_call_per_message(messages)
    if expects_content_parts(template):
        messages = [with_content_parts(message) for message in messages]
    return messages


def adjust_to_error(
    error: Exception, messages: list[Message], tools: Tools | None
) -> tuple[list[Message], Tools | None]:
    """Messages and tools for another attempt after a template has failed; the same objects if none would help."""
    text = str(error)
    for pattern, adjust in _BY_ERROR:
        if pattern.search(text):
            return adjust(messages, tools)
    return messages, tools


def one_call_per_message(messages: Sequence[Message]) -> list[Message]:
    """Replaces messages with several calls by one per call, each followed by its results. The order is kept."""
    adjusted: list[Message] = []
    i = 0
    while i < len(messages):
        message, i = messages[i], i + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            adjusted.append(message)
            continue
        results: list[Message] = []
        while i < len(messages) and messages[i]["role"] == "tool":
            results.append(messages[i])
            i += 1
        by_call: dict[str, list[Message]] = {}
        for result in results:
            by_call.setdefault(str(result.get("tool_call_id")), []).append(result)
        for number, call in enumerate(calls):
            if number:
                message = {"role": message["role"], "content": ""}
            adjusted.append({**message, "tool_calls": [call]})
            adjusted += by_call.pop(str(call.get("id")), ())
        for others in by_call.values():
            adjusted += others
    return adjusted


def _split_calls(messages: list[Message], tools: Tools | None) -> tuple[list[Message], Tools | None]:
    return one_call_per_message(messages), tools


def _describe_tools(messages: list[Message], tools: Tools | None) -> tuple[list[Message], Tools | None]:
    return messages, tools and [
        {**tool, "function": {**tool["function"], "description": tool["function"].get("description") or ""}}
        if isinstance(tool.get("function"), Mapping)
        else tool
        for tool in tools
    ]


def _join_content_to_reasoning(messages: list[Message], tools: Tools | None) -> tuple[list[Message], Tools | None]:
    def join(message: Message) -> Message:
        names = [name for name in ("thinking", "reasoning", "reasoning_content") if isinstance(message.get(name), str)]
        content = message.get("content")
        if not (message.get("tool_calls") and content and isinstance(content, str) and names):
            return message
        return {**message, "content": "", **{name: f"{message[name]}\n{content}" for name in names}}

    return [join(message) for message in messages], tools


def _shorten_call_ids(messages: list[Message], tools: Tools | None) -> tuple[list[Message], Tools | None]:
    def short(call_id: object) -> str:
        text = str(call_id)
        if len(text) == _CALL_ID_LENGTH and text.isalnum():
            return text
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_CALL_ID_LENGTH]

    def shorten(message: Message) -> Message:
        if message.get("tool_call_id") is not None:
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "id": short(call.get("id"))} for call in calls]}
        return message

    return [shorten(message) for message in messages], tools


_Adjustment = Callable[[list[Message], Tools | None], tuple[list[Message], Tools | None]]

_BY_ERROR: Iterable[tuple[re.Pattern[str], _Adjustment]] = (
    (re.compile(r"single tool-calls? at once", re.IGNORECASE), _split_calls),
    (re.compile(r"no attribute 'description'"), _describe_tools),
    (re.compile(r"call IDs should be .*length 9", re.IGNORECASE), _shorten_call_ids),
    (re.compile(r"both content and thinking", re.IGNORECASE), _join_content_to_reasoning),
)
"""What helps after an error, by its text: those of the templates of Llama 3, gpt-oss and Hermes, Mistral, gpt-oss."""

MAX_ATTEMPTS = len(tuple(_BY_ERROR)) + 1
"""Attempts to render a conversation, with one more adjustment each."""
