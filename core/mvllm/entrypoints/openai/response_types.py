"""Bodies of responses, for the description of the API: what `/openapi.json` says of them is made from these types.

Handlers build plain dicts, because a busy server encodes one for every token; the tests compare what servers send with
these types. A field with `NotRequired` is sent only where it applies. The type of a stream is that of one event's data.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from mvllm.entrypoints.openai.protocol import AnyList


class PromptTokensDetails(TypedDict):
    """Where the tokens of a prompt came from."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """What completion tokens were used for."""

    reasoning_tokens: int


class Usage(TypedDict):
    """The tokens of a request, over all of its prompts and choices."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class PromptLogprob(TypedDict):
    """The log-probability of a token at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion: four lists with an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One text of a completion, or in a stream its next part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    conditional_logprobs: NotRequired[list[float]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]
    weight_versions: NotRequired[list[list[int]] | None]
    token_ids: NotRequired[list[int] | None]
    prompt_token_ids: NotRequired[list[int] | None]


class GenerationResponse(TypedDict):
    """What responses and chunks of completions and of chat completions have in common."""

    id: str
    created: int
    model: str
    service_tier: NotRequired[str | None]
    system_fingerprint: NotRequired[str | None]
    kv_transfer_params: NotRequired[dict[str, Any] | None]
    warnings: NotRequired[list[str]]


class Completion(GenerationResponse):
    """Continuations of prompts: of each prompt in order, `n` choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(GenerationResponse):
    """An event of a streamed completion. The stream ends with `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TokenLogprob(TypedDict):
    """The log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """The log-probability of a generated token, and those of the most probable ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens of a message."""

    content: list[ChatTokenLogprob] | None
    refusal: None


class FunctionOfCall(TypedDict):
    """The function of a tool call. The arguments are the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(TypedDict):
    """A tool call of a message."""

    id: str
    type: Literal["function"]
    function: FunctionOfCall


class AssistantMessage(TypedDict):
    """A message of the model. `reasoning` and `reasoning_content` are equal."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[MessageToolCall]]


class ChatChoice(TypedDict):
    """One message of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    conditional_logprobs: NotRequired[list[float]]
    weight_versions: NotRequired[list[list[int]] | None]


class ChatCompletion(GenerationResponse):
    """The next message of a conversation, in `n` choices."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: NotRequired[str | None]
    metadata: NotRequired[dict[str, str]]


class FunctionDelta(TypedDict):
    """The next part of the function of a tool call. The first one has the name."""

    name: NotRequired[str]
    arguments: str


class ToolCallPart(TypedDict):
    """The next part of a tool call. The first one has the id."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class MessageDelta(TypedDict):
    """The next part of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPart]]


class ChatChunkChoice(TypedDict):
    """The next part of one choice. The last one has the finish reason."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    conditional_logprobs: NotRequired[list[float]]
    weight_versions: NotRequired[list[list[int]] | None]


class ChatCompletionChunk(GenerationResponse):
    """An event of a streamed chat completion. The stream ends with `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str | None]


# --- audio


class AudioUsage(TypedDict):
    """The length of an audio file."""

    type: Literal["duration"]
    seconds: int


class TranscriptionSegment(TypedDict):
    """The text of a window of the audio. Times are seconds, `seek` is frames of the spectrogram."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: None


class Transcription(TypedDict):
    """The text of an audio file. All fields but `text` and `usage` are those of `verbose_json`."""

    text: str
    usage: AudioUsage
    task: NotRequired[str]
    language: NotRequired[str]
    duration: NotRequired[float]
    segments: NotRequired[list[TranscriptionSegment]]


# --- embeddings, classes, scores


class PoolingUsage(TypedDict):
    """The tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


class PoolingList(TypedDict):
    """What lists with an entry for each input have in common."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage


class Embedding(TypedDict):
    """The embedding of an input: numbers, or base64 of them."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(PoolingList):
    """An embedding for each input."""

    data: list[Embedding]


class PoolingOutput(TypedDict):
    """The pooling output of an input: an embedding, one for each token, or scores; or base64 of the numbers."""

    object: Literal["pooling"]
    index: int
    data: list[float | list[float]] | str


class PoolingResponse(PoolingList):
    """A pooling output for each input."""

    data: list[PoolingOutput]


class Classification(TypedDict):
    """The most probable class of an input, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PoolingList):
    """The class of each input."""

    data: list[Classification]


class Score(TypedDict):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(PoolingList):
    """A score for each pair."""

    data: list[Score]


class RankedDocument(TypedDict):
    """A document: its text, or its parts."""

    text: NotRequired[str]
    multi_modal: NotRequired[list[dict[str, Any] | str]]


class RerankResult(TypedDict):
    """A document with its index in the request and its score."""

    index: int
    document: NotRequired[RankedDocument]
    relevance_score: float


class RerankResponse(TypedDict):
    """The documents, the most relevant first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


# --- models, tokens, monitoring


class ModelCard(TypedDict):
    """A name that requests may use. While the model is being loaded, `max_model_len` is null and the last three fields,
    what the model can do, what prompts may contain and messages to begin with, are left out."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    capabilities: NotRequired[list[Literal["chat", "completion", "tools", "reasoning", "embedding"]]]
    input_modalities: NotRequired[list[Literal["text", "image", "audio", "video"]]]
    example_messages: NotRequired[list[str | list[dict[str, Any]]]]


class ModelList(TypedDict):
    """The names of the model and of LoRA adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(TypedDict):
    """Token ids, and their strings if the request asks for them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeResponse(TypedDict):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(TypedDict):
    """The fields of the model's tokenizer_config.json, and the chat template."""

    tokenizer_class: str
    chat_template: str | None


class HealthStatus(TypedDict):
    """`ok`, or what is wrong."""

    status: str


class VersionResponse(TypedDict):
    """The version of mvllm."""

    version: str


class LoadResponse(TypedDict):
    """Requests, cache usage and throughput, now. A server that is loading its model has the first two fields only."""

    server_load: int
    phase: str
    num_requests_running: NotRequired[int]
    num_requests_waiting: NotRequired[int]
    kv_cache_usage: NotRequired[float]
    prompt_tokens_per_second: NotRequired[float]
    generation_tokens_per_second: NotRequired[float]


# --- administration


class ServedModelInfo(TypedDict):
    """Settings of the model."""

    model: str
    architecture: str
    dtype: str
    max_model_len: int
    quantization: str | None
    logprobs_mode: str


class ServerInfo(TypedDict):
    """Version, phase, plugins, platform, workers of all replicas, and model."""

    version: str
    phase: str
    http_plugins: list[str]
    platform: str | None
    num_workers: int | None
    model: ServedModelInfo | None


class CacheReset(TypedDict):
    """Whether the cache was cleared."""

    reset: bool


class SleepState(TypedDict):
    """Whether the engine sleeps."""

    is_sleeping: bool


class PauseState(TypedDict):
    """Whether the engine is paused."""

    is_paused: bool


class LoadedAdapter(TypedDict):
    """A LoRA adapter that has been loaded."""

    id: str
    object: Literal["model"]
    root: str
    parent: str


class UnloadedAdapter(TypedDict):
    """A LoRA adapter that has been unloaded."""

    id: str
    object: Literal["model"]
    deleted: bool


class WeightTransferState(TypedDict):
    """The trainer's process group is joined."""

    message: str


class WeightState(TypedDict):
    """The version of the weights, whether an update is under way, and why they are unusable; null if they are not."""

    weight_version: int
    is_updating: bool
    failure: str | None


class RpcResults(TypedDict):
    """What the method returned, for each worker in the order of ranks."""

    results: AnyList
