"""Bodies of responses, for the description of the API. `NotRequired` fields are sent only where they apply."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class OllamaAnswer(TypedDict):
    """What answers have in common. The last line of a stream, and a whole answer, have counts of tokens, and durations
    in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    warnings: NotRequired[list[str]]


class OllamaFunction(TypedDict):
    """The function of a tool call, with its arguments as an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(TypedDict):
    """A tool call."""

    id: str
    function: OllamaFunction


class OllamaMessage(TypedDict):
    """A message of the model, or its next part."""

    role: str
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class OllamaChatResponse(OllamaAnswer):
    """The next message of a conversation, or a line of its stream."""

    message: OllamaMessage


class OllamaGenerateResponse(OllamaAnswer):
    """The answer to a prompt, or a line of its stream."""

    response: str
    thinking: NotRequired[str]


class OllamaEmbedResponse(TypedDict):
    """A vector of length 1 for each input."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(TypedDict):
    """The vector of one input; empty for a request that only loads the model."""

    embedding: list[float]


class OllamaDetails(TypedDict):
    """Format, family, size and quantization of a model; empty for what is not known."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    """A name that requests may use."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModelList(TypedDict):
    """The models."""

    models: list[OllamaModel]


class OllamaRunningModel(TypedDict):
    """A loaded model."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModelList(TypedDict):
    """The loaded models."""

    models: list[OllamaRunningModel]


class OllamaShowResponse(TypedDict):
    """Details of a model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    """The version of Ollama whose API the routes have."""

    version: str
