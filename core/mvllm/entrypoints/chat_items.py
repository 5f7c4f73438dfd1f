"""Takes images, audio and videos out of the messages of a conversation, and leaves their places.

    messages    [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    places      [{"type": "text", "text": "What is this?"}, {"type": "image"}]
    items       {"image": ["data:..."]}

Chat templates write the placeholder of the model at each place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.errors import RequestError
from mvllm.messages.inputs import TextPrompt
from mvllm.multimodal.item_request import check_modality

Items = dict[str, list[Any]]
"""Contents by modality, in the order of their places."""

_MODALITY_OF_PART = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_pil": "image",
    "video_url": "video",
    "input_video": "video",
    "video": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio": "audio",
}
TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts with text, and the field of the text."""

_CONTENT_KEYS = ("url", "data", "path")
_AUDIO_FORMAT = re.compile(r"[a-z0-9]{1,16}")


def take_items(messages: Sequence[Any], config: EngineConfig) -> tuple[Sequence[Any], Items]:
    """The messages with places instead of items, and the items. Messages without items are returned as they are.

    Args:
        messages: Of the chat completions API; `content` may be a list of parts.
        config: The engine's configuration: what the model takes, and how many.

    Raises:
        RequestError: A part has no content, the model does not take it, or there are too many.
    """
    if config.model.multimodal is None or not isinstance(messages, list | tuple):
        return messages, {}
    items: Items = {}
    found = [_take_from(f"Message {i}", message, items) for i, message in enumerate(messages)]
    _check_numbers(items, config)
    return (found, items) if items else (messages, {})


def num_rendered_chars(messages: Sequence[Any]) -> int:
    """Characters of the texts that every chat template writes: those of all messages but the model's own, of which
    templates leave out thoughts."""
    num_chars = 0
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") == "assistant":
            continue
        content = message.get("content")
        if isinstance(content, str):
            num_chars += len(content)
        elif isinstance(content, list | tuple):
            num_chars += sum(len(text_of_part(part) or "") for part in content)
    return num_chars


def content_prompt(
    content: object, config: EngineConfig, find_placeholders: Callable[[], Mapping[str, str]], where: str
) -> TextPrompt:
    """The prompt of a list of parts that is not a message: its texts, joined by line feeds.

    If the texts have a placeholder for each item, these are the places of the items; otherwise a placeholder is written
    where each item is.

    Args:
        content: Parts of the chat completions API: texts and items.
        find_placeholders: Returns those of `placeholder_texts`; called if there are items.
        where: What has the content, for errors.

    Raises:
        RequestError: A part is not acceptable, the model does not take it, or there are too many.
    """
    if not isinstance(content, list | tuple) or not content:
        raise RequestError(f"{where}: content must be a list of parts, such as {_EXAMPLES['image']}.")
    items: Items = {}
    parts = _take_from(where, {"content": content}, items)["content"]
    _check_numbers(items, config)
    unknown = next((part for part in parts if not (is_place(part) or text_of_part(part) is not None)), None)
    if unknown is not None:
        kind = unknown.get("type") if isinstance(unknown, Mapping) else type(unknown).__name__
        raise RequestError(f"{where}: a part of content is a text or an item; found {str(kind)[:40]!r}.")
    placeholders = find_placeholders() if items else {}
    texts = [text for part in parts if (text := text_of_part(part)) is not None]
    text = "\n".join(texts)
    if any(text.count(placeholders[modality] or "\0") != len(values) for modality, values in items.items()):
        text = "\n".join(placeholders[part["type"]] if is_place(part) else str(text_of_part(part)) for part in parts)
    prompt = TextPrompt(prompt=text)
    if items:
        prompt["multi_modal_data"] = items
    return prompt


def _check_numbers(items: Items, config: EngineConfig) -> None:
    for modality, values in items.items():
        check_modality(modality, len(values), config.model, config.multimodal)


def placeholder_texts(
    config: EngineConfig, tokenizer: Tokenizer, told: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """By modality, the text that stands for an item where the chat template does not write it.

    Items of models with cross-attention have no token: no text stands for them.

    Args:
        told: The placeholders of the model's processor, in place of the tokens that take embeddings.
    """
    model = config.model.multimodal
    if model is None:
        return {}
    found = {
        modality: model.written_as.get(modality) or ("" if token_id < 0 else tokenizer.token_text(token_id))
        for modality, token_id in model.placeholders.items()
    }
    # What is written may be more than the placeholder: marks of its begin and end.
    return found | {name: text for name, text in told.items() if text not in model.written_as.get(name, "")}


def rendered_prompt(
    text: str,
    items: Items,
    cut_at: str | None,
    mm_processor_kwargs: Mapping[str, Any] | None,
    *,
    add_special_tokens: bool = False,
) -> TextPrompt:
    """The prompt of a rendered conversation.

    Args:
        text: The conversation, with the places of its items.
        cut_at: The text at which `text` is cut, see `TextPrompt`; None if nothing is cut.
        mm_processor_kwargs: Arguments of the model's processor of images, audio and videos.
        add_special_tokens: Whether the tokenizer's special tokens are added to those of the template.
    """
    prompt = TextPrompt(prompt=text, add_special_tokens=add_special_tokens)
    if cut_at is not None:
        prompt["cut_at"] = cut_at
    if items:
        prompt["multi_modal_data"] = items
        if mm_processor_kwargs is not None:
            prompt["mm_processor_kwargs"] = dict(mm_processor_kwargs)
    return prompt


def is_place(part: object) -> bool:
    """Whether a part of a message is the place of an item."""
    return isinstance(part, Mapping) and part.keys() == {"type"} and part["type"] in ("image", "video", "audio")


def places_to_text(content: list[Any], template: str, placeholders: Mapping[str, str]) -> str | list[Any]:
    """The content of a message as its template can render it: with placeholders, if the template knows no such parts.

    Args:
        template: Text of the template; empty if unknown.
    """
    kinds = {part["type"] for part in content if is_place(part)}
    if not kinds or not template or all(re.search(rf"['\"](input_)?{kind}(_url)?['\"]", template) for kind in kinds):
        return content
    return "\n".join(placeholders.get(part["type"], "") if is_place(part) else part["text"] for part in content)


def _take_from(where: str, message: Any, items: Items) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts: list[Any] = []
    has_items = False
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        modality = _MODALITY_OF_PART.get(kind) if isinstance(kind, str) else None
        if modality is None:
            text = text_of_part(part)
            parts.append(part if text is None else {"type": "text", "text": text})
            continue
        items.setdefault(modality, []).append(_content_of(where, str(kind), modality, part))
        parts.append({"type": modality})
        has_items = True
    return {**message, "content": parts} if has_items else message


def text_of_part(part: object) -> str | None:
    """The text of a part of a message; None if the part is no text. A plain string is a text, too."""
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else None
    kind = part.get("type")
    text = part.get(TEXT_FIELDS[kind]) if isinstance(kind, str) and kind in TEXT_FIELDS else None
    return text if isinstance(text, str) else None


def _content_of(where: str, kind: str, modality: str, part: Mapping[str, Any]) -> Any:
    value = part.get(kind)
    if value is None:  # the form of transformers: {"type": "image", "url": ...}
        value = next((part[key] for key in (f"{modality}_url", *_CONTENT_KEYS) if part.get(key) is not None), None)
    if isinstance(value, Mapping):
        value = _audio_url(value) if kind == "input_audio" else value.get("url")
    if value is None or value == "":
        raise RequestError(
            f"{where} has a part of type {kind!r} without content: send {_EXAMPLES[modality]}.",
            parameter="messages",
        )
    return value


_EXAMPLES = {
    "image": '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
    "video": '{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}',
    "audio": '{"type": "input_audio", "input_audio": {"data": "<base64>", "format": "wav"}}',
}


def _audio_url(audio: Mapping[str, Any]) -> str | None:
    data, form = audio.get("data"), audio.get("format")
    if not isinstance(data, str) or not data:
        return None
    form = form if isinstance(form, str) and _AUDIO_FORMAT.fullmatch(form) else "wav"
    return f"data:audio/{form};base64,{data}"
