"""Converts a request of the Responses API to a chat completion request: items to messages, tools to their other format.

    input           "text"  |  [message | reasoning | function_call | function_call_output, ...]
                       │             └── an assistant's turn: several items, one message ──┐
    messages        instructions, the previous conversation, and these

Errors name the fields of the original request, by `CHAT_TO_RESPONSES_FIELDS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mvllm.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from mvllm.errors import RequestError
from mvllm.messages.structured_outputs import MAX_NESTING

CHAT_TO_RESPONSES_FIELDS = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat completion request, with the corresponding fields of the Responses API."""

_SHARED_FIELDS = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatCompletionRequest.__struct_fields__
    and name not in ("tools", "tool_choice", "stream_options", "top_logprobs")  # these differ
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of content parts with text, and the field of the text."""

MAX_ITEMS = 1 << 16
"""Most items of an input."""

_MAX_METADATA = (16, 64, 512)
"""Most entries of `metadata`, characters of a name, and characters of a value, as in the OpenAI API."""

Message = dict[str, Any]


def to_chat_request(request: ResponsesRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """The equivalent chat completion request.

    Args:
        messages: The conversation.

    Raises:
        RequestError: A field is not valid.
    """
    for name in ("tools", "tool_choice", "text"):
        if _nests_deeper(getattr(request, name), MAX_NESTING):  # the response repeats it
            raise RequestError(f"{name} nests deeper than {MAX_NESTING} levels.", parameter=name)
    _check_metadata(request.metadata or {})
    effort = (request.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise RequestError("reasoning.effort must be a text.", parameter="reasoning")
    if request.instructions is not None:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    return ChatCompletionRequest(
        messages=list(messages),
        max_tokens=request.max_output_tokens,
        response_format=_response_format(request.text),
        tools=None if request.tools is None else [_tool(i, tool) for i, tool in enumerate(request.tools)],
        tool_choice=_tool_choice(request.tool_choice),
        reasoning_effort=effort,
        **{name: getattr(request, name) for name in _SHARED_FIELDS},
    )


def input_messages(value: str | Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The messages of `input`.

    Raises:
        RequestError: The input is missing, or an item is not valid.
    """
    if value is None:
        raise RequestError("input is missing.", parameter="input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not value:
        raise RequestError("input is an empty list.", parameter="input")
    if len(value) > MAX_ITEMS:
        raise RequestError(f"input may have {MAX_ITEMS} items; found {len(value)}.", parameter="input")
    return items_to_messages(value)


def items_to_messages(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Items as messages. Reasoning, text and function calls of one assistant's turn are one message.

    Raises:
        RequestError: An item is not valid.
    """
    messages: list[Message] = []
    turn: Message | None = None  # the assistant's message that function calls are added to
    reasoning: list[str] = []  # belongs to the next item
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning.append(_reasoning_text(where, item))
            continue
        if kind == "function_call_output":
            messages.append(_output_of_call(where, item))
            turn = None
        elif kind == "function_call":
            if turn is None or reasoning:
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            turn.setdefault("tool_calls", []).append(_call(where, item))
        elif kind == "message":
            message = _message(where, item)
            messages.append(message)
            turn = message if message["role"] == "assistant" else None
        else:
            raise RequestError(
                f"{where} has the type {ascii(kind)[:60]}; allowed are message, reasoning, function_call and "
                "function_call_output.",
                parameter="input",
            )
        if reasoning and turn is not None:
            turn["reasoning"] = "\n".join(reasoning)
        reasoning = []
    return messages


def _check_metadata(metadata: Mapping[str, str]) -> None:
    max_entries, max_name, max_value = _MAX_METADATA
    lengths = len(metadata), max(map(len, metadata), default=0), max(map(len, metadata.values()), default=0)
    if lengths[0] > max_entries or lengths[1] > max_name or lengths[2] > max_value:
        raise RequestError(
            f"metadata may have {max_entries} entries, with names of {max_name} characters and values of {max_value}.",
            parameter="metadata",
        )


def _nests_deeper(value: object, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        parents = [parent for parent in level if isinstance(parent, dict | list)]
        level = [item for p in parents for item in (p.values() if isinstance(p, dict) else p)]
        if not level:
            return False
    return True


def _message(where: str, item: Mapping[str, Any]) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}.", parameter="input")
    # Chat templates have no role developer; it is the same as system.
    return {"role": "system" if role == "developer" else role, "content": _text(f"{where}.content", item, "content")}


def _call(where: str, item: Mapping[str, Any]) -> Message:
    function = {name: _string(where, item, name) for name in ("name", "arguments")}
    return {"id": _string(where, item, "call_id"), "type": "function", "function": function}


def _output_of_call(where: str, item: Mapping[str, Any]) -> Message:
    call_id = _string(where, item, "call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": _text(f"{where}.output", item, "output")}


def _reasoning_text(where: str, item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: its content, or its summary."""
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{where}: content and summary must be lists of texts.", parameter="input")
    return "\n".join(map(str, texts))


def _text(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a text or a list of text parts.", parameter="input")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{i}] must be a text part (input_text, output_text); this model accepts no others.",
                parameter="input",
            )
        texts.append(text)
    return "\n".join(texts)


def _string(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{field} must be a text.", parameter="input")
    return value


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The `response_format` that corresponds to `text`."""
    if text is None:
        return None
    if text.get("verbosity") not in (None, "medium"):
        raise RequestError(
            "text.verbosity is not supported: describe the length in the instructions.", parameter="text"
        )
    format_ = text.get("format")
    if format_ is None:
        return None
    kind = format_.get("type") if isinstance(format_, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            "text.format must be an object whose type is 'text', 'json_object' or 'json_schema'; "
            f"found {ascii(kind)[:40]}.",
            parameter="text",
        )
    if kind == "json_schema":
        if format_.get("schema") is None:
            raise RequestError("text.format of type json_schema needs a schema.", parameter="text")
        return {"type": kind, "json_schema": {key: format_.get(key) for key in ("name", "schema", "strict")}}
    return {"type": kind}


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function in the format of chat completions, where it is an object within the tool."""
    if tool.get("type") != "function":
        raise RequestError(
            f"tools[{i}] has the type {ascii(tool.get('type'))[:60]}; this server runs no tools itself, so only "
            "'function' is allowed.",
            parameter="tools",
        )
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "name": ...}.',
            parameter="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}
