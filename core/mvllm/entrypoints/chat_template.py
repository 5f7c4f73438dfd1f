"""Renders a conversation to a prompt with the model's chat template.

Messages have the format of the chat completions API, and are converted to the format that templates expect:

    arguments of a tool call    JSON text           -> object
    content of the assistant    null                -> empty text
    content                     list of text parts  -> text, unless there are places of images among them
    reasoning                   reasoning           -> reasoning_content

What a template still cannot render is adjusted to it (`template_adjustments`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mvllm.config.hf_config import read_json_object
from mvllm.engine.tokenizer.folder_template import FolderTemplate
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.chat_items import is_place, places_to_text, text_of_part
from mvllm.entrypoints.template_adjustments import MAX_ATTEMPTS, adjust_to_error, adjust_to_template
from mvllm.errors import ModelError, RequestError
from mvllm.messages.field_checks import describe_value

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
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
)
_MAX_TEMPLATE_BYTES = 4 << 20

SHORT_CONVERSATION = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What can I do for you?"},
    {"role": "user", "content": "Name a color."},
)
"""Tests a template when a server or a conversation starts."""
NO_CHAT_TEMPLATE = "The model has no chat template, so a conversation cannot be turned into a prompt."

RENDERED_SETTINGS = ("tools", "documents", "chat_template_kwargs")
"""Arguments of `render_chat` whose texts templates write into the prompt."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`, which is a text or a list of text parts. Templates may use more keys.

Assistant messages may have `tool_calls` and `reasoning` (or `reasoning_content`), tool messages a `tool_call_id`.
"""


def reserved_variables(names: Iterable[str]) -> list[str]:
    """Those of the names that a template gets from the conversation, and that nobody else may set."""
    return [name for name in names if name in _RESERVED]


def render_chat(
    tokenizer: Tokenizer,
    messages: Conversation,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    placeholders: Mapping[str, str] | None = None,
) -> str:
    """The prompt of a conversation, including special tokens: tokenize it with add_special_tokens=False.

    Args:
        chat_template: A Jinja template in place of the tokenizer's own.
        add_generation_prompt: End with the header of the assistant's next message.
        continue_final_message: Leave the last message open, so that the model continues it.
        tools: Functions that the model may call, as JSON schemas.
        documents: Texts for the model to use, usually with `title` and `text`; few templates support them.
        chat_template_kwargs: More variables for the template.
        placeholders: By modality, the text that stands for an image, audio or video where the template writes none.
            Without it, messages may have no places of them (see `chat_items.take_items`).

    Raises:
        RequestError: The conversation or a setting is not valid, there is no template, or it failed.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: pass add_generation_prompt=False.",
            parameter="continue_final_message",
        )
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise RequestError(
            f"chat_template_kwargs must be a dict; found {describe_value(chat_template_kwargs)}.",
            parameter="chat_template_kwargs",
        )
    extra = dict(chat_template_kwargs or {})
    if reserved := reserved_variables(extra):
        raise RequestError(f"chat_template_kwargs may not set {', '.join(reserved)}.", parameter="chat_template_kwargs")
    for name, value in (("tools", tools), ("documents", documents)):
        _check_objects(name, value)
    if documents:
        if "documents" in extra:
            raise RequestError("Pass documents once, not also in chat_template_kwargs.", parameter="documents")
        extra["documents"] = list(documents)
    if chat_template is None and getattr(tokenizer.template_renderer, "chat_template", None) is None:
        raise RequestError(
            f"{NO_CHAT_TEMPLATE} Give one with chat_template, or continue a prompt instead of a conversation.",
            parameter="chat_template",
        )
    if chat_template is not None and "{" not in chat_template:
        raise RequestError(
            f"chat_template must be a Jinja template itself, not its file; found {describe_value(chat_template)}.",
            parameter="chat_template",
        )
    given: object = messages
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(
            f"A conversation is a list of messages; found {describe_value(messages)}.", parameter="messages"
        )
    if not messages:
        raise RequestError("The conversation has no messages; pass at least one.", parameter="messages")
    conversation = [_check_message(i, message, bool(placeholders)) for i, message in enumerate(messages)]
    settings = {
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tokenize": False,
        **extra,
    }
    every_tool = [_with_type(tool) for tool in tools] if tools else None
    return _render(tokenizer, conversation, every_tool, settings, placeholders or {})


def _render(
    tokenizer: Tokenizer,
    conversation: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    settings: Mapping[str, Any],
    placeholders: Mapping[str, str],
) -> str:
    renderer, template = tokenizer.template_renderer, settings["chat_template"]
    with contextlib.suppress(Exception):  # rendering reports it
        template = renderer.get_chat_template(template, tools)
    shown = template if isinstance(template, str) else ""
    for message in conversation:
        if isinstance(message.get("content"), list):
            message["content"] = places_to_text(message["content"], shown, placeholders)
    conversation = adjust_to_template(conversation, shown)
    for _ in range(MAX_ATTEMPTS):
        try:
            return str(renderer.apply_chat_template(conversation, tools=tools, **settings))
        except Exception as e:
            adjusted = adjust_to_error(e, conversation, tools)
            if adjusted == (conversation, tools):
                from mvllm.engine.tokenizer.jinja_template import template_error  # transformers' code needs none

                source = getattr(renderer, "source", "") if settings["chat_template"] is None else ""
                raise template_error(e, shown, source) from e
            conversation, tools = adjusted
    raise AssertionError("each attempt makes an adjustment that is not made twice")


def uses_transformers_template(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer renders its template with transformers' code, not with its own."""
    renderer = tokenizer.template_renderer
    if isinstance(renderer, FolderTemplate):
        return True
    apply = getattr(type(renderer), "apply_chat_template", None)
    return getattr(apply, "__module__", None) == "transformers.tokenization_utils_base"


def resolve_chat_template(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The template that `render_chat` would use, None if there is none, and the special tokens by name.

    Args:
        settings: Keyword arguments of `render_chat`.

    Raises:
        RequestError: The tokenizer has several templates, but not the requested one or no default.
    """
    renderer, given = tokenizer.template_renderer, settings.get("chat_template")
    if given is None and renderer.chat_template is None:
        return None, {}
    try:
        return str(renderer.get_chat_template(given, settings.get("tools"))), dict(renderer.special_tokens_map)
    except Exception as e:
        from mvllm.engine.tokenizer.jinja_template import template_error

        raise template_error(e, "") from e


def check_chat_template(folder: Path, given: str | None = None, *, render: bool) -> None:
    """Checks the chat template in a tokenizer's folder, if it has one, or the one of `--chat-template`.

    Args:
        given: That of `--chat-template`.
        render: Also renders a short conversation with it, in this process without limits.

    Raises:
        ModelError: It has a syntax error, or calls a function that does not exist. Other errors may be those of a
            template that requires other messages.
    """
    template = given or read_chat_template(folder)
    if template is None:
        return
    from mvllm.engine.tokenizer.jinja_template import check_syntax

    source = "of --chat-template" if given else str(template_file(folder))
    check_syntax(template, f"The chat template {source}")
    tokenizer: Any = SimpleNamespace(template_renderer=FolderTemplate(template, read_special_tokens(folder)))
    try:
        if render:
            render_chat(tokenizer, SHORT_CONVERSATION)
    except RequestError as e:
        if e.parameter == "chat_template":
            raise unusable_template(e, source) from e


def unusable_template(error: RequestError, source: str) -> ModelError:
    """The error for a template that fails with SHORT_CONVERSATION."""
    name = "The chat template"
    text = str(error).replace(name, f"With three short messages, the chat template {source}", 1).rstrip(".")
    return ModelError(f"{text}. Correct it, or give another with --chat-template.")


def template_file(folder: Path) -> Path:
    """The file that has the template of `read_chat_template`."""
    own = folder / "chat_template.jinja"
    return own if own.is_file() else folder / "tokenizer_config.json"


def read_chat_template(folder: Path, *, for_tools: bool = False) -> str | None:
    """The chat template in a tokenizer's folder, read without transformers; None if no file has one.

    Args:
        for_tools: Prefer the template for requests with tools, if there are several templates.

    Raises:
        ModelError: Its file is larger than any template.
    """
    tool_use = folder / "additional_chat_templates" / "tool_use.jinja"
    for path in ([tool_use] if for_tools else []) + [folder / "chat_template.jinja"]:
        with contextlib.suppress(OSError, UnicodeDecodeError), path.open("rb") as file:
            content = file.read(_MAX_TEMPLATE_BYTES + 1)
            if len(content) > _MAX_TEMPLATE_BYTES:
                raise ModelError(
                    f"The chat template {path} has more than {_MAX_TEMPLATE_BYTES} bytes, which is more than any "
                    "template needs. Check the origin of the model."
                )
            return content.decode("utf-8")
    template = read_tokenizer_config(folder).get("chat_template")
    if isinstance(template, list):  # objects with name and template
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = (named.get("tool_use") if for_tools else None) or named.get("default")
    return template if isinstance(template, str) else None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens in a tokenizer's folder, by their names in chat templates, such as `bos_token`."""
    special = {}
    for name, token in read_tokenizer_config(folder).items():
        content = token.get("content") if isinstance(token, Mapping) else token
        if name.endswith("_token") and isinstance(content, str):
            special[name] = content
    return special


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """The contents of a tokenizer's `tokenizer_config.json`; empty if it has none."""
    with contextlib.suppress(ModelError):
        return read_json_object(folder / "tokenizer_config.json")
    return {}


def is_conversation(value: object) -> bool:
    """Whether `value` is one conversation, not a list of conversations."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(m, Mapping) for m in value)


def _check_message(i: int, message: Mapping[str, Any], may_have_places: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"Message {i} must be a dict with 'role' and 'content'; found {describe_value(message)}.",
            parameter="messages",
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"Message {i} needs a 'role' such as 'user'; found {role!r}.", parameter="messages")
    checked = dict(message)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        has_places = may_have_places and any(map(is_place, content))
        checked["content"] = _check_parts(i, content) if has_places else "\n".join(_texts(i, content))
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"The content of message {i} must be a text or a list of text parts; found {describe_value(content)}.",
            parameter="messages",
        )
    elif content is None and not set(message) - {"role", "content"}:
        raise RequestError(f"Message {i} has no 'content'.", parameter="messages")
    elif content is None and role == "assistant":
        checked["content"] = ""  # templates concatenate it or search in it
    calls = checked.pop("tool_calls", None)
    if calls:
        checked["tool_calls"] = _check_calls(i, calls)
    reasoning = message.get("reasoning")
    if isinstance(reasoning, str) and message.get("reasoning_content") is None:
        checked["reasoning_content"] = reasoning
    return checked


def _check_calls(i: int, calls: object) -> list[dict[str, Any]]:
    """The tool calls of a message, with arguments as objects."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(
            f"The tool_calls of message {i} must be a list; found {describe_value(calls)}.", parameter="messages"
        )
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"Message {i} has a tool call without a function, which is an object with 'name' and 'arguments'.",
                parameter="messages",
            )
        arguments = as_object(function.get("arguments"))
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def as_object(arguments: object) -> object:
    """The arguments of a tool call as an object. A text that is not a JSON object is returned unchanged."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _check_objects(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RequestError(f"{name} must be a list of objects; found {describe_value(value)}.", parameter=name)
    for item in value:
        if not isinstance(item, Mapping):
            raise RequestError(f"{name} must be a list of objects; found {describe_value(item)} in it.", parameter=name)


def _with_type(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tool, in which a function has its type: templates read it."""
    is_untyped = tool.get("type") is None and "function" in tool
    return (
        {"type": "function", **{key: value for key, value in tool.items() if key != "type"}}
        if is_untyped
        else dict(tool)
    )


def _check_parts(i: int, parts: Sequence[Any]) -> list[Any]:
    """Parts of a message with places of items."""
    return [part if is_place(part) else {"type": "text", "text": _text_of(i, part)} for part in parts]


def _texts(i: int, parts: Sequence[Any]) -> list[str]:
    return [_text_of(i, part) for part in parts]


def _text_of(i: int, part: Any) -> str:
    text = text_of_part(part)
    if text is None:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(
            f"Message {i} has a part of type {kind!r}; this model accepts only text parts.", parameter="messages"
        )
    return text
