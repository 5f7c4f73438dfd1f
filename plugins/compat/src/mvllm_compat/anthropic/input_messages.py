"""Converts a request of the Anthropic Messages API to a chat completion request.

    system                      a system message
    user       text, image      a user message
               tool_result      a tool message, and a user message with its images
    assistant  text blocks      its content       ┐
               thinking         its reasoning     ├ one assistant message
               tool_use         its tool calls    ┘

Messages with the same role that follow each other are one message. If the last message is the assistant's, the model
continues it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mvllm.extension_api import RequestError
from mvllm.extension_api.http import ChatCompletionRequest
from mvllm_compat.anthropic.protocol import SHARED_FIELDS, ConversationRequest, MessagesRequest
from mvllm_compat.anthropic.tools import chat_tool_choice, chat_tools
from mvllm_compat.thinking_variables import thinking_variables

_INT64_MAX = (1 << 63) - 1

CHAT_TO_MESSAGES_FIELDS = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking",
}
"""Fields of a chat completion request, with the corresponding fields of the Messages API."""

MAX_BLOCKS = 1 << 16
"""Most content blocks of a conversation."""

BILLING_HEADER = "x-anthropic-billing-header:"
"""Beginning of a system block that agents send for the account of a service. It differs from request to request, so in
front of the prompt it would make the prefix cache useless."""

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_THINKING_TYPES = ("enabled", "adaptive", "between_tools", "disabled")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """A content block.

    Attributes:
        where: Its place in the request, for errors.
        type: Its `type`.
        fields: All its fields.
    """

    where: str
    type: str
    fields: dict[str, Any]


def to_chat_request(request: ConversationRequest) -> ChatCompletionRequest:
    """The equivalent chat completion request.

    Raises:
        RequestError: A field is not valid.
    """
    for name in ("mcp_servers", "container"):
        if getattr(request, name):
            raise RequestError(
                f"{name} is not supported: this server runs no tools and no code itself. Send tools that the client "
                "runs.",
                parameter=name,
            )
    messages = chat_messages(request.messages)
    if request.system is not None and (system := system_text(request.system)):
        messages.insert(0, {"role": "system", "content": system})
    last = messages[-1]
    continues = last["role"] == "assistant" and not last.get("tool_calls") and bool(last["content"])
    tool_choice, parallel = chat_tool_choice(request.tool_choice)
    thinks, budget, is_shown = _thinking(request.thinking)
    effort, response_format = _output_config(request)
    chat = ChatCompletionRequest(
        messages=messages,
        tools=None if request.tools is None else chat_tools(request.tools),
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        continue_final_message=continues,
        include_reasoning=is_shown,
        reasoning_effort=effort,
        response_format=response_format,
        chat_template_kwargs={**thinking_variables(thinks), **(request.chat_template_kwargs or {})},
    )
    if isinstance(request, MessagesRequest):
        if request.max_tokens is None:
            raise RequestError("max_tokens is missing.", parameter="max_tokens")
        for name in SHARED_FIELDS:
            setattr(chat, name, getattr(request, name))
        chat.stop = request.stop_sequences
        chat.thinking_token_budget = budget
    return chat


def system_text(system: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of the system prompt.

    Raises:
        RequestError: A block is not a text.
    """
    if isinstance(system, str):
        return system
    texts = []
    for block in _blocks("system", "system", system):
        if block.type != "text":
            raise RequestError(f"{block.where} has the type {_shown(block.type)}; allowed is text.", parameter="system")
        texts.append(_string(block, "text", "system"))
    return "\n".join(text for text in texts if not text.startswith(BILLING_HEADER))


def chat_messages(messages: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The messages of a conversation in the format of chat completions.

    Raises:
        RequestError: There are none, or a message or a block is not valid.
    """
    if not messages:
        raise RequestError("messages is missing or empty.", parameter="messages")
    num_blocks = len(messages) + sum(
        len(content) for message in messages if isinstance(content := message.get("content"), list)
    )
    if num_blocks > MAX_BLOCKS:
        raise RequestError(
            f"messages may have {MAX_BLOCKS} messages and blocks; found {num_blocks}.", parameter="messages"
        )
    found: list[Message] = []
    tool_names: dict[str, str] = {}  # by the ids of calls
    for i, message in enumerate(messages):
        where, role = f"messages[{i}]", message.get("role")
        blocks = list(_blocks(f"{where}.content", "messages", message.get("content")))
        if role == "assistant":
            _append(found, _assistant_message(blocks, tool_names))
        elif role == "user":
            for each in _user_messages(blocks, tool_names):
                _append(found, each)
        elif role == "system":
            found.append({"role": "system", "content": list(map(_text, blocks))})
        else:
            raise RequestError(f"{where}.role must be 'user', 'assistant' or 'system'.", parameter="messages")
    for each in found:
        for name in ("content", "reasoning"):
            if name in each:
                each[name] = _joined(each[name])
    return found


def _joined(parts: Sequence[str | Message]) -> str | list[Message]:
    """Texts as one text; with images among them, parts of a chat completion request."""
    if not any(isinstance(part, dict) for part in parts):
        return "\n".join(str(part) for part in parts if part)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts if part]


def _append(messages: list[Message], message: Message) -> None:
    """Appends a message, or adds it to the last one if both are the user's or both are the assistant's. Its content and
    its reasoning are lists of texts, which are joined at the end."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    for name in ("content", "reasoning", "tool_calls"):
        if name in message:
            last.setdefault(name, []).extend(message[name])


def _assistant_message(blocks: Sequence[Block], tool_names: dict[str, str]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for block in blocks:
        if block.type == "thinking":
            thoughts.append(_string(block, "thinking"))
        elif block.type == "redacted_thinking":  # another service's; nobody else can read it
            continue
        elif block.type == "tool_use":
            calls.append(_call(block, tool_names))
        else:
            texts.append(_text(block))
    message: Message = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(blocks: Sequence[Block], tool_names: Mapping[str, str]) -> Iterator[Message]:
    """A tool message for each result, and a user message for what is between them. Images of results, which chat
    templates do not expect in tool messages, are the user's, too."""
    texts: list[str | Message] = []
    images: list[Message] = []
    for block in blocks:
        if block.type != "tool_result":
            texts.append(_image(block) if block.type == "image" else _text(block))
            continue
        if texts:
            yield {"role": "user", "content": texts}
            texts = []
        yield _tool_message(block, tool_names, images)
    texts = [*images, *texts]
    if texts or not any(block.type == "tool_result" for block in blocks):
        yield {"role": "user", "content": texts}


def _call(block: Block, tool_names: dict[str, str]) -> Message:
    call_id, name = _string(block, "id"), _string(block, "name")
    arguments = block.fields.get("input")
    if not isinstance(arguments, dict | None):
        raise RequestError(f"{block.where}.input must be an object.", parameter="messages")
    tool_names[call_id] = name
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _tool_message(block: Block, tool_names: Mapping[str, str], images: list[Message]) -> Message:
    """The message of a result. Its images are appended to `images`."""
    call_id, content = _string(block, "tool_use_id"), block.fields.get("content")
    blocks = [] if content is None else list(_blocks(f"{block.where}.content", "messages", content))
    images += [_image(each) for each in blocks if each.type == "image"]
    text = "\n".join(_text(each) for each in blocks if each.type != "image")
    if block.fields.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}"  # chat templates have no mark for it
    message = {"role": "tool", "tool_call_id": call_id, "content": [text]}
    return {**message, "name": tool_names[call_id]} if call_id in tool_names else message


def _blocks(where: str, field: str, content: object) -> Iterator[Block]:
    """The blocks of a content; a text is one text block.

    Args:
        where: Path of the content in the request.
        field: The request's field.

    Raises:
        RequestError: It is neither a text nor a list of objects with a type.
    """
    if isinstance(content, str):
        yield Block(where, "text", {"text": content})
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of blocks.", parameter=field)
    for i, given in enumerate(content):
        fields = {"type": "text", "text": given} if isinstance(given, str) else given
        kind = fields.get("type") if isinstance(fields, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"{where}[{i}] must be an object with a type.", parameter=field)
        yield Block(f"{where}[{i}]", kind, fields)


def _image(block: Block) -> Message:
    """An image block as a part of a chat completion request.

    Raises:
        RequestError: It has no source that is supported.
    """
    source = block.fields.get("source")
    source = source if isinstance(source, dict) else {}
    url: object = None
    if source.get("type") == "base64":
        data, kind = source.get("data"), source.get("media_type")
        url = f"data:{kind if isinstance(kind, str) else 'image/png'};base64,{data}" if isinstance(data, str) else None
    elif source.get("type") == "url":
        url = source.get("url")
    if not isinstance(url, str) or not url:
        raise RequestError(
            f"{block.where}.source must be an object of type 'base64' with data, or of type 'url' with url.",
            parameter="messages",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _text(block: Block) -> str:
    """The text of a block: of a text block, or of a document that is plain text.

    Raises:
        RequestError: It is another block.
    """
    if block.type == "text":
        return _string(block, "text")
    source = block.fields.get("source")
    if block.type == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _string(Block(f"{block.where}.source", "text", source), "data")
    if block.type in ("image", "document"):
        raise RequestError(
            f"{block.where} is {'an image' if block.type == 'image' else 'a document that is not plain text'}, which "
            "is not supported here. Images may stand in the user's messages and in results of tools.",
            parameter="messages",
        )
    raise RequestError(
        f"{block.where} has the type {_shown(block.type)}, which is not supported here. Supported are text, image, "
        "thinking, tool_use, tool_result, and documents of plain text.",
        parameter="messages",
    )


def _string(block: Block, name: str, field: str = "messages") -> str:
    value = block.fields.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{block.where}.{name} must be a text.", parameter=field)
    return value


def _shown(kind: str) -> str:
    return ascii(kind)[:60]


def _thinking(thinking: Mapping[str, Any] | None) -> tuple[bool, int | None, bool]:
    """Whether the model thinks, its budget in tokens, and whether the response has the thinking."""
    if thinking is None:
        return False, None, False
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in _THINKING_TYPES:
        raise RequestError(
            f"thinking.type must be one of {', '.join(_THINKING_TYPES)}; found {ascii(kind)[:40]}.",
            parameter="thinking",
        )
    if isinstance(budget, float) and budget.is_integer():
        budget = int(budget)
    if budget is not None and (
        not isinstance(budget, int) or isinstance(budget, bool) or not 1 <= budget <= _INT64_MAX
    ):
        raise RequestError(
            f"thinking.budget_tokens must be an integer from 1 to {_INT64_MAX}; found {ascii(budget)[:40]}.",
            parameter="thinking",
        )
    if kind == "disabled":
        return False, None, False
    return True, budget, thinking.get("display") != "omitted"


def _output_config(request: ConversationRequest) -> tuple[str | None, dict[str, Any] | None]:
    """The effort of the thinking, and the `response_format` that corresponds to the request's format."""
    config = request.output_config or {}
    effort = config.get("effort")
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise RequestError(f"output_config.effort must be one of {', '.join(_EFFORTS)}.", parameter="output_config")
    name = "output_config" if config.get("format") is not None else "output_format"
    wanted = config.get("format") if name == "output_config" else request.output_format
    response_format = None
    if wanted is not None:
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or wanted.get("schema") is None:
            raise RequestError(
                f'{name}: the format must be {{"type": "json_schema", "schema": {{...}}}}.', parameter=name
            )
        response_format = {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}
    return None if effort is None else _EFFORTS[effort], response_format
