"""Inputs of scores as users pass them: texts, prompts, and contents with images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict, cast

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.frontend.scoring import ScoringInput
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.chat_items import content_prompt, placeholder_texts
from mvllm.errors import RequestError


class ContentInput(TypedDict):
    """Parts of the chat completions API (`text`, `image_url`, ...) that are one input of a score."""

    content: list[dict[str, Any]]


class EngineWithTokenizer(Protocol):
    """What is read of an engine."""

    config: EngineConfig

    @property
    def tokenizer(self) -> Tokenizer: ...


def score_inputs(data: object, name: str, engine: EngineWithTokenizer) -> list[ScoringInput]:
    """The inputs, with prompts in place of contents.

    Args:
        data: A text, a dict, or a list of these.
        name: The caller's name of it, for errors.

    Raises:
        RequestError: A content is not acceptable.
    """
    values: Sequence[object] = [data] if isinstance(data, str | dict) else list(cast(Sequence[object], data))
    placeholders: dict[str, str] | None = None
    found: list[Any] = []
    for i, value in enumerate(values):
        if isinstance(value, dict) and "content" in value:
            if placeholders is None:
                placeholders = placeholder_texts(engine.config, engine.tokenizer)
            try:
                value = content_prompt(value["content"], engine.config, placeholders, f"{name}[{i}]")
            except RequestError as e:
                raise RequestError(str(e), parameter=name) from e
        found.append(value)
    return found
