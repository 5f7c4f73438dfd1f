"""Converts requests of the Ollama API to chat completion requests.

options         sampling parameters under other names
format          response_format
think           variables of the chat template, or reasoning_effort
messages        the same, but calls have neither a type nor, often, an id, and results name the tool
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mvllm.extension_api import RequestError, get_logger
from mvllm.extension_api.http import ChatCompletionRequest, convert_fields
from mvllm_compat.ollama.protocol import (
    OPTION_FIELDS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
    OllamaOptions,
)
from mvllm_compat.thinking_variables import thinking_variables

logger = get_logger("mvllm.compat.ollama.input_messages")

_EFFORTS = ("low", "medium", "high", "max")

Message = dict[str, Any]


def chat_request(request: OllamaChatRequest) -> ChatCompletionRequest:
    """The equivalent of a request to `/api/chat`.

    Raises:
        RequestError: A field is not valid.
    """
    if request.format and request.tools:
        raise RequestError(
            "format and tools exclude each other: the format constrains the whole answer. Send only one of them.",
            parameter="format",
        )
    messages = chat_messages(request.messages or ())
    last = messages[-1] if messages else {}
    chat = _chat_request(request, messages)
    chat.tools = request.tools or None
    chat.continue_final_message = (
        last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")
    )
    return chat


def generate_request(request: OllamaGenerateRequest) -> ChatCompletionRequest:
    """The equivalent of a request to `/api/generate`: the prompt is the user's only message.

    Raises:
        RequestError: A field is not valid.
    """
    unsupported = {
        "template": "a template is a program: this server uses the model's own",
        "suffix": "fill-in-the-middle is not implemented; send only prompt",
        "context": "send the conversation to /api/chat",
    }
    for name, reason in unsupported.items():
        if getattr(request, name):
            raise RequestError(f"{name} is not supported: {reason}.", parameter=name)
    if request.raw and request.images:
        raise RequestError("images need the chat template, which raw switches off; send only one.", parameter="images")
    if request.raw and request.system:
        raise RequestError("system needs the chat template, which raw switches off; send only one.", parameter="system")
    messages: list[Message] = [] if not request.system else [{"role": "system", "content": request.system}]
    messages.append({"role": "user", "content": _with_images("images", request.prompt or "", request.images)})
    return _chat_request(request, messages)


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in the format of chat completions.

    Raises:
        RequestError: A message is not valid.
    """
    found: list[Message] = []
    open_calls = _OpenCalls()
    for i, message in enumerate(messages):
        where, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise RequestError(f"{where}.role must be a text.", parameter="messages")
        if not isinstance(content, str | None):
            raise RequestError(f"{where}.content must be a text.", parameter="messages")
        turn: Message = {"role": role, "content": _with_images(f"{where}.images", content or "", message.get("images"))}
        if role == "assistant":
            if isinstance(thinking := message.get("thinking"), str) and thinking:
                turn["reasoning"] = thinking
            if message.get("tool_calls"):
                turn["tool_calls"] = _calls(where, message["tool_calls"], len(found))
                open_calls = _OpenCalls(turn["tool_calls"])
        elif role == "tool":
            turn |= open_calls.take(message)
        found.append(turn)
    return found


def _chat_request(request: OllamaGenerationRequest, messages: list[Message]) -> ChatCompletionRequest:
    if request.logprobs or request.top_logprobs:
        raise RequestError(
            "logprobs is not supported here: send the request to /v1/chat/completions.", parameter="logprobs"
        )
    think = request.think
    if isinstance(think, str) and think not in _EFFORTS:
        raise RequestError(f"think must be true, false or one of {', '.join(_EFFORTS)}.", parameter="think")
    effort = "high" if think == "max" else think if isinstance(think, str) else None
    return ChatCompletionRequest(
        messages=messages,
        stream=request.stream is not False,
        response_format=_response_format(request.format),
        reasoning_effort=effort,
        include_reasoning=think is not False,
        chat_template_kwargs=None if think is None else thinking_variables(think is not False),
        **_sampling_fields(request.options or {}),
    )


def _sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion request that correspond to the options. Other options are logged.

    Raises:
        APIError: An option has the wrong type (400).
    """
    ignored = [name for name in options if name not in OPTION_FIELDS]
    if ignored:
        names = ", ".join(ascii(name[:40])[1:-1] for name in ignored[:16])
        logger.debug("These options of a request have no effect: %s.", names)
    known = convert_fields(options, OllamaOptions, within="options")
    fields = {field: getattr(known, name) for name, field in OPTION_FIELDS.items()}
    if known.num_predict is not None and known.num_predict <= 0:
        fields["max_tokens"] = None
    return fields


def _response_format(wanted: object) -> dict[str, Any] | None:
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"type": "json_object"}
    if isinstance(wanted, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}
    raise RequestError("format must be 'json' or a JSON schema, an object.", parameter="format")


def _calls(where: str, calls: object, turn: int) -> list[Message]:
    """The calls of a message, with ids: those given, or new ones."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list.", parameter="messages")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}.tool_calls[{i}] must have a function, an object with name and arguments.",
                parameter="messages",
            )
        call_id = call.get("id")
        call_id = call_id if isinstance(call_id, str) and call_id else f"call_{turn}_{i}"
        named = {"name": function["name"], "arguments": function.get("arguments")}
        found.append({"id": call_id, "type": "function", "function": named})
    return found


class _OpenCalls:
    """Calls that have no result yet."""

    def __init__(self, calls: Sequence[Message] = ()) -> None:
        self._names = {call["id"]: call["function"]["name"] for call in calls}
        self._ids = deque(self._names)
        self._ids_by_name: dict[str, deque[str]] = {}
        for call_id, name in self._names.items():
            self._ids_by_name.setdefault(name, deque()).append(call_id)

    def take(self, message: Mapping[str, Any]) -> Message:
        """The id and the name of the call that a result belongs to, which is no longer open: by its id, else the first
        call of the tool that it names, else, without a name, the first call."""
        call_id, name = message.get("tool_call_id"), message.get("tool_name", message.get("name"))
        if not isinstance(call_id, str) or call_id not in self._names:
            named = isinstance(name, str) and bool(name)
            queue = self._ids_by_name.get(str(name), deque()) if named else self._ids
            while queue and queue[0] not in self._names:  # its result came by its id
                queue.popleft()
            if not queue:
                return {"name": name} if named else {}
            call_id = queue.popleft()
        return {"tool_call_id": call_id, "name": self._names.pop(call_id)}


def _with_images(where: str, text: str, images: object) -> str | list[Message]:
    """The content of a message with images, which come before its text.

    Args:
        images: A list of base64 or data URLs, or None.

    Raises:
        RequestError: It is something else.
    """
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise RequestError(f"{where} must be a list of images in base64.", parameter="images")
    parts: list[Message] = [
        {
            "type": "image_url",
            "image_url": {"url": image if image.startswith("data:") else f"data:image/png;base64,{image}"},
        }
        for image in images
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts
