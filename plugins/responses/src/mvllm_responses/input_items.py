"""Converts a request of the Responses API to a chat completion request: items to messages, tools to their other format.

    input           "text"  |  [message | reasoning | function_call | function_call_output | mcp_call ..., ...]
                       │             └── an assistant's turn: several items, one message ──┐
    messages        instructions, the previous conversation, and these

Errors name the fields of the original request, by `CHAT_TO_RESPONSES_FIELDS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mvllm.extension_api import RequestError
from mvllm.extension_api.http import MAX_NESTING, ChatCompletionRequest, text_of_part
from mvllm_responses.client_functions import client_functions, qualified_name
from mvllm_responses.items import ID_PREFIXES, Item, check_metadata
from mvllm_responses.protocol import ResponsesRequest

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
Message = dict[str, Any]


def to_chat_request(
    request: ResponsesRequest, messages: Sequence[Message], more_tools: Sequence[Mapping[str, Any]] = ()
) -> ChatCompletionRequest:
    """The equivalent chat completion request.

    Args:
        messages: The conversation.
        more_tools: Tools of tool servers, in the format of chat completions. Those servers themselves, among the tools
            of the request, are left out.

    Raises:
        RequestError: A field is not valid.
    """
    for name in ("tools", "tool_choice", "text"):
        if _nests_deeper(getattr(request, name), MAX_NESTING):  # the response repeats it
            raise RequestError(f"{name} nests deeper than {MAX_NESTING} levels.", parameter=name)
    check_metadata(request.metadata)
    effort = (request.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise RequestError("reasoning.effort must be a text.", parameter="reasoning")
    if request.instructions is not None:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    functions, _ = client_functions(request.tools)
    return ChatCompletionRequest(
        messages=list(messages),
        max_tokens=request.max_output_tokens,
        response_format=_response_format(request.text),
        tools=[*functions, *map(dict, more_tools)] or None,
        tool_choice=_tool_choice(request.tool_choice),
        reasoning_effort=effort,
        **{name: getattr(request, name) for name in _SHARED_FIELDS},
    )


class MessageBuilder:
    """Turns items into messages, a list of items after the other.

    Reasoning, text and function calls of one assistant's turn are one message. A call of a tool server is in its item
    with its output: it is the assistant's call and the tool's message. So calls that the model made at once follow
    each other, in the conversation that a response continues as in those that continue the response.

    Args:
        checks_approvals: Whether an approval must have its request before it.

    Attributes:
        messages: The messages so far.
        listed_tools: The last `mcp_list_tools` item of each server label.
    """

    def __init__(self, *, checks_approvals: bool = True) -> None:
        self._checks_approvals = checks_approvals
        self.messages: list[Message] = []
        self.listed_tools: dict[str, Item] = {}
        self._turn: Message | None = None  # the assistant's message that calls are added to
        self._reasoning: list[str] = []  # belongs to the next item
        self._approval_requests: dict[str, Item] = {}
        self._approvals: dict[str, Item] = {}
        self._function_names: Mapping[tuple[str, str], str] = {}
        self._functions: list[tuple[tuple[str, str], Message]] = []  # of the calls of tool servers

    def set_function_names(self, names: Mapping[tuple[str, str], str]) -> None:
        """Names the functions of all calls of tool servers as the model knows them.

        Args:
            names: By server label and name of the tool. Others keep the name of the tool.
        """
        self._function_names = names
        for key, function in self._functions:
            function["name"] = names.get(key, key[1])

    def take_approved_calls(self) -> list[Item]:
        """The `mcp_approval_request` items that have been approved and not been called since."""
        approved = [self._approval_requests[each] for each in self._approvals]
        self._approvals = {}
        return approved

    def add(self, items: Iterable[Item], where: str = "input") -> None:
        """Adds items.

        Args:
            where: What the items are, for errors.

        Raises:
            RequestError: An item is not valid.
        """
        for i, item in enumerate(items):
            self._add(f"{where}[{i}]", item)

    def _add(self, where: str, item: Item) -> None:
        match item.get("type", "message"):
            case "reasoning":
                self._reasoning.append(_reasoning_text(where, item))
                return
            case "mcp_list_tools":
                self.listed_tools[_string(where, item, "server_label")] = item
                return
            case "mcp_approval_request":
                _string(where, item, "name"), _string(where, item, "arguments"), _string(where, item, "server_label")
                self._approval_requests[_string(where, item, "id")] = item
                return
            case "mcp_approval_response":
                self._add_approval(where, item)
                return
            case "mcp_call":
                self._add_finished_call(where, item)
            case "function_call":
                self._append_call(_call(where, item, _string(where, item, "call_id")))
            case "function_call_output":
                self.messages.append(_output_of_call(where, item))
                self._turn = None
            case "message":
                message = _message(where, item)
                self.messages.append(message)
                self._turn = message if message["role"] == "assistant" else None
                self._use_reasoning()
            case kind:
                raise RequestError(
                    f"{where} has the type {ascii(kind)[:60]}; allowed are {', '.join(ID_PREFIXES)}.",
                    parameter="input",
                )
        self._reasoning = []

    def _append_call(self, call: Message) -> None:
        if self._turn is None or self._reasoning:
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        self._turn.setdefault("tool_calls", []).append(call)
        self._use_reasoning()

    def _use_reasoning(self) -> None:
        if self._reasoning and self._turn is not None:
            self._turn["reasoning"] = "\n".join(self._reasoning)

    def _add_finished_call(self, where: str, item: Item) -> None:
        call_id = _string(where, item, "id")
        request_id = item.get("approval_request_id")
        if isinstance(request_id, str):
            self._approvals.pop(request_id, None)
        call = _call(where, item, call_id)
        key = _string(where, item, "server_label"), call["function"]["name"]
        call["function"]["name"] = self._function_names.get(key, key[1])
        self._functions.append((key, call["function"]))
        self._append_call(call)
        output = item.get("output") if item.get("error") is None else f"Error: {error_text(item['error'])}"
        self.messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": output if isinstance(output, str) else ""}
        )
        self._turn = None

    def _add_approval(self, where: str, item: Item) -> None:
        request_id = _string(where, item, "approval_request_id")
        request = self._approval_requests.get(request_id)
        if request is None and not self._checks_approvals:
            return
        if request is None:
            raise RequestError(
                f"{where}.approval_request_id is not the id of an mcp_approval_request before it. Send the response "
                "with previous_response_id, its conversation, or all earlier items.",
                parameter="input",
            )
        if not isinstance(item.get("approve"), bool):
            raise RequestError(f"{where}.approve must be true or false.", parameter="input")
        if item["approve"]:
            self._approvals[request_id] = item
            return
        self._append_call(_call(where, request, request_id))
        reason = item.get("reason")
        text = "The user has not allowed this call." + (f" {reason}" if isinstance(reason, str) else "")
        self.messages.append({"role": "tool", "tool_call_id": request_id, "content": text})
        self._turn, self._reasoning = None, []


def items_to_messages(items: Iterable[Item]) -> list[Message]:
    """Items as messages. See MessageBuilder.

    Raises:
        RequestError: An item is not valid.
    """
    builder = MessageBuilder()
    builder.add(items)
    return builder.messages


def error_text(error: object) -> str:
    """The text of the error of an `mcp_call`, for the model."""
    if not isinstance(error, Mapping):
        return str(error)
    message = error.get("message")
    if isinstance(message, str):
        return message
    content = error.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "\n".join(texts) or "The tool has failed."


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
    return {"role": "system" if role == "developer" else role, "content": _content(f"{where}.content", item)}


def _call(where: str, item: Mapping[str, Any], call_id: str) -> Message:
    function = {name: _string(where, item, name) for name in ("name", "arguments")}
    if item.get("namespace") is not None:
        function["name"] = qualified_name(_string(where, item, "namespace"), function["name"])
    return {"id": call_id, "type": "function", "function": function}


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


def _content(where: str, item: Mapping[str, Any]) -> str | list[Message]:
    """The content of a message: a text, or parts of a chat completion request if there are images or audio."""
    value = item.get("content")
    kinds = (
        [part.get("type") if isinstance(part, Mapping) else None for part in value] if isinstance(value, list) else ()
    )
    if not any(kind in _MEDIA for kind in kinds):
        return _text(where, item, "content")
    return [_part(f"{where}[{i}]", part) for i, part in enumerate(value or ())]


_MEDIA = ("input_image", "input_audio", "input_video")


def _part(where: str, part: Mapping[str, Any]) -> Message:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "input_audio":
        return {"type": kind, "input_audio": part.get("input_audio")}
    if kind not in _MEDIA:
        return {"type": "text", "text": _text(where.rpartition("[")[0], {"content": [part]}, "content")}
    name = "image_url" if kind == "input_image" else "video_url"
    url = part.get(name)
    if not isinstance(url, str) or not url:
        raise RequestError(
            f"{where} needs {name}, a URL or a data URL; files of the service (file_id) are not supported.",
            parameter="input",
        )
    return {"type": name, name: {"url": url}}


def _text(where: str, item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a text or a list of text parts.", parameter="input")
    texts = []
    for i, part in enumerate(value):
        text = text_of_part(part)
        if text is None:
            raise RequestError(
                f"{where}[{i}] must be a text part (input_text, output_text), or in a message input_image, input_audio "
                "or input_video.",
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


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise RequestError(
            'tool_choice must be "none", "auto", "required", {"type": "function", "name": ...} or '
            '{"type": "mcp", "server_label": ..., "name": ...}.',
            parameter="tool_choice",
        )
    name, namespace = choice["name"], choice.get("namespace")
    if isinstance(namespace, str):
        name = qualified_name(namespace, name)
    return {"type": "function", "function": {"name": name}}
