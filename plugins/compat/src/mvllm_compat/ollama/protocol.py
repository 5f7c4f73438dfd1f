"""Request bodies of the Ollama API. Fields may be null, as if they had not been sent."""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.extension_api.http import ModelRequest


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The options that are sampling parameters. All others, such as those of how a model is loaded, have no effect.

    Attributes:
        num_predict: Most tokens of the answer; 0 and negative numbers for as many as fit into the context.
        repeat_penalty: The repetition penalty.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


OPTION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "num_predict": "max_tokens",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""The options, with the corresponding fields of chat completion requests."""


class OllamaRequest(ModelRequest, kw_only=True):
    """A request with a model.

    Attributes:
        keep_alive: No effect: the model stays loaded.
        options: OllamaOptions, and others, which have no effect.
    """

    keep_alive: Any = None
    options: dict[str, Any] | None = None


class OllamaGenerationRequest(OllamaRequest, kw_only=True):
    """Fields of requests that generate text.

    Attributes:
        stream: Whether the answer comes in several lines; true by default.
        format: `json` for any JSON object, or a JSON schema.
        think: Whether the model thinks before it answers, or with which effort; by default the model's choice.
        truncate: Whether a prompt that is too long loses its beginning, of a chat the oldest messages; true by default.
    """

    stream: bool | None = None
    format: Any = None
    think: bool | str | None = None
    truncate: bool | None = None

    # Without effect: an answer ends where the context does.
    shift: Any = None

    # Unsupported.
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(OllamaGenerationRequest, kw_only=True):
    """Body of `POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaGenerationRequest, kw_only=True):
    """Body of `POST /api/generate`.

    Attributes:
        prompt: The user's message, rendered with the chat template.
        system: A system message before it.
        raw: Use the prompt as it is, without a template.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    # Unsupported.
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: Any = None


class OllamaEmbedRequest(OllamaRequest, kw_only=True):
    """Body of `POST /api/embed`.

    Attributes:
        truncate: Truncate inputs that are longer than the context; true by default.
        dimensions: Number of leading components to keep.
    """

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsRequest(OllamaRequest, kw_only=True):
    """Body of `POST /api/embeddings`, the older form of `/api/embed` for one input."""

    prompt: str | None = None


class OllamaShowRequest(OllamaRequest, kw_only=True):
    """Body of `POST /api/show`.

    Attributes:
        name: Older name of `model`.
    """

    name: str | None = None
    verbose: Any = None
    system: Any = None
    template: Any = None
