"""The prompt of a conversation: its rendered text, with its images, audio and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.chat_items import placeholder_texts, rendered_prompt, take_items
from mvllm.entrypoints.chat_template import RENDERED_SETTINGS, Conversation, render_chat
from mvllm.entrypoints.typed_placeholders import TypedPlaceholders
from mvllm.messages.inputs import TextPrompt
from mvllm.multimodal.processor_client import ProcessorClient


def chat_prompt(
    config: EngineConfig,
    tokenizer: Tokenizer,
    messages: Conversation,
    *,
    item_client: ProcessorClient | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TextPrompt:
    """The prompt of a conversation for an engine in this process.

    Args:
        config: The engine's configuration.
        item_client: Knows the placeholders of the model's processor; needed for conversations with items.
        mm_processor_kwargs: Arguments of the model's processor of images, audio and videos.
        settings: Of `render_chat`.

    Raises:
        RequestError: The conversation or a setting is not valid, or the model does not take its items.
    """
    places, items = take_items(messages, config)
    placeholders, cut_at = placeholder_texts(config, tokenizer), None
    if items and item_client is not None:
        told = item_client.placeholders()
        typed = TypedPlaceholders([*placeholders.values(), *told.values()], config.model.max_model_len)
        placeholders = placeholder_texts(config, tokenizer, told)
        settings = {name: typed.cut(value) if name in RENDERED_SETTINGS else value for name, value in settings.items()}
        rendered = render_chat(tokenizer, typed.cut_messages(places), placeholders=placeholders, **settings)
        text, cut_at = typed.cut_prompt(rendered)
    else:
        text = render_chat(tokenizer, places, placeholders=placeholders, **settings)
    return rendered_prompt(text, items, cut_at, mm_processor_kwargs)
