"""The prompt of a conversation: its rendered text, with its images, audio and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.chat_items import placeholder_texts, take_items
from mvllm.entrypoints.chat_template import Conversation, render_chat
from mvllm.messages.inputs import TextPrompt


def chat_prompt(
    config: EngineConfig,
    tokenizer: Tokenizer,
    messages: Conversation,
    *,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> TextPrompt:
    """The prompt of a conversation for an engine in this process.

    Args:
        config: The engine's configuration.
        mm_processor_kwargs: Arguments of the model's processor of images, audio and videos.
        settings: Of `render_chat`.

    Raises:
        RequestError: The conversation or a setting is not valid, or the model does not take its items.
    """
    places, items = take_items(messages, config)
    text = render_chat(tokenizer, places, placeholders=placeholder_texts(config, tokenizer), **settings)
    prompt = TextPrompt(prompt=text, add_special_tokens=False)  # the template has written them
    if items:
        prompt["multi_modal_data"] = items
        if mm_processor_kwargs is not None:
            prompt["mm_processor_kwargs"] = dict(mm_processor_kwargs)
    return prompt
