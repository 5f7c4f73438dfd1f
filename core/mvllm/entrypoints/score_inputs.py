"""Inputs of scores as users pass them: texts, prompts, and contents with images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypedDict

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.frontend.scoring import ScoringInput
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.chat_items import content_prompt, placeholder_texts
from mvllm.errors import RequestError
from mvllm.multimodal.processor_client import ProcessorClient


class ContentInput(TypedDict):
    """Parts of the chat completions API (`text`, `image_url`, ...) that are one input of a score."""

    content: list[dict[str, Any]]


class EngineWithTokenizer(Protocol):
    """What is read of an engine."""

    config: EngineConfig
    item_client: ProcessorClient

    @property
    def tokenizer(self) -> Tokenizer: ...


def has_item(value: object) -> bool:
    """Whether an input is a content with an image, audio or a video."""
    content = value.get("content") if isinstance(value, dict) else None
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") != "text" for part in content)


def score_inputs(data: object, name: str, engine: EngineWithTokenizer) -> list[ScoringInput]:
    """The inputs, with prompts in place of contents. May block until the model's processor is loaded.

    Args:
        data: A text, a dict, or a list of these.
        name: The caller's name of it, for errors.

    Raises:
        RequestError: An input or a content is not acceptable.
    """
    if not isinstance(data, Iterable):
        raise RequestError(f"{name} must be a text, a dict, or a list of these; found {data!r:.60}.", parameter=name)
    values = [data] if isinstance(data, str | dict) else list(data)

    def find_placeholders() -> Mapping[str, str]:
        return placeholder_texts(engine.config, engine.tokenizer, engine.item_client.placeholders())

    found: list[Any] = []
    for i, value in enumerate(values):
        if isinstance(value, dict) and "content" in value:
            try:
                value = content_prompt(value["content"], engine.config, find_placeholders, f"{name}[{i}]")
            except RequestError as e:
                raise RequestError(str(e), parameter=name) from e
        found.append(value)
    return found
