"""What clients may send: the fields of the OpenAI API and those that this field's engines have added.

The idea: a body is decoded by msgspec straight into one of these structs, types checked on the way, so nothing of the
wrong type gets further than here. Every field may be null, which means that it was not given. Fields that no struct has
are reported (`unknown_fields.py`); those that clients send as a matter of course and that need no answer are fields
without effect (`ClientRequest`). Fields that are known and cannot be honoured are refused by name
(`reject_unsupported_fields`), since ignoring them would answer another question than was asked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.errors import RequestError


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # without effect, as for responses


class ModelRequest(msgspec.Struct, kw_only=True):
    """A request that names a model."""

    model: str | None = None


class ClientRequest(ModelRequest, kw_only=True):
    """A request with the fields that clients of OpenAI's API and of other engines send, and that have no effect here:
    names and labels for the client's own records, and hints for a service with many tenants. They are not unknown."""

    user: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None
    request_id: Any = None
    rid: Any = None


class GenerationRequest(ClientRequest, kw_only=True):
    """What requests for completions and for chat completions have in common.

    Sampling parameters have the names and bounds of `SamplingParams`, which checks them.
    """

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    best_of: int | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    vllm_xargs: dict[str, Any] | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    # Deprecated: what structured_outputs was before.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # Known, and refused where they ask for something.
    logits_processors: Any = None
    thinking_token_budget: int | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/completions`.

    Attributes:
        prompt: A text, a list of texts, a list of token ids, or a list of those.
        logprobs: How many alternatives to report for each token; 0 reports the token alone.
    """

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`.

    Attributes:
        logprobs: Whether to report log-probabilities, `top_logprobs` alternatives for each token.
        max_completion_tokens: Goes before `max_tokens`; without either, what the context has room for.
    """

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None


class EmbeddingRequest(ClientRequest, kw_only=True):
    """Body of `POST /v1/embeddings`.

    Attributes:
        input: A text, a list of texts, a list of token ids, or a list of those.
        encoding_format: `float` (the default) writes numbers, `base64` the bytes of little-endian float32.
        dimensions: Keep only the first so many components.
        normalize: Scale vectors to length 1; by default what the model's files say.
        truncate_prompt_tokens: Cut longer inputs to so many tokens; -1 for as many as the model takes.
    """

    input: str | list[str | int | list[int]] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """Body of `POST /pooling`.

    Attributes:
        task: `embed`, `token_embed` or `classify`; by default what the model is for.
        pooling_type: Which hidden states count; by default what the model's files say. `all` is `token_embed`.
        use_activation: Turn the results of a classifier's head into probabilities.
    """

    task: str | None = None
    pooling_type: str | None = None
    use_activation: bool | None = None


class ClassificationRequest(ClientRequest, kw_only=True):
    """Body of `POST /classify`.

    Attributes:
        input: A text, a list of texts, a list of token ids, or a list of those.
        use_activation: Turn the results of the model's head into probabilities; true by default.
        truncate_prompt_tokens: Cut longer inputs to so many tokens; -1 for as many as the model takes.
    """

    input: str | list[str | int | list[int]] | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class TextPairRequest(ClientRequest, kw_only=True):
    """What requests to compare texts have in common.

    Attributes:
        use_activation: As in ClassificationRequest.
        truncate_prompt_tokens: Cut what the model reads at once, both texts of a cross-encoder together.
    """

    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


class ScoreRequest(TextPairRequest, kw_only=True):
    """Body of `POST /score`.

    Attributes:
        text_1, queries: A text, or one for each of the others; two names for the same.
        text_2, documents: A text or a list of texts; likewise.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class Document(msgspec.Struct, kw_only=True):
    """A document as Cohere's clients send it."""

    text: str


class RerankRequest(TextPairRequest, kw_only=True):
    """Body of `POST /rerank`.

    Attributes:
        query: What documents are compared with.
        documents: Texts, or objects that have one.
        top_n: How many results are wanted; 0 or none for all.
        return_documents: Repeat the documents in the results; true by default.
    """

    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    """Accepted and without effect: padding of events is a matter for servers that clients share with eavesdroppers."""

    include_obfuscation: bool | None = None


class ResponsesRequest(ClientRequest, kw_only=True):
    """Body of `POST /v1/responses`.

    Attributes:
        input: A text, or a list of items: messages, thoughts, calls of functions and what these returned.
        instructions: A system message before everything else; not kept for later turns.
        previous_response_id: Go on with the conversation that this response ended.
        store: Whether the response can be asked for, and gone on with, later.
        cache_salt: By default that of the response that is gone on with.
    """

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None

    # The engine's own, as in the other requests.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Names for somebody else's books, and hints: accepted, and without effect.
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None

    # Known, and refused where they ask for something.
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    context_management: list[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None


class TokenizeRequest(ModelRequest, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or messages that become one."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ModelRequest, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int] | None = None


_UNSUPPORTED = {
    "logits_processors": "code from requests is never run; start the server with --logits-processors",
    "thinking_token_budget": "this server does not follow the parts of an answer",
    "suffix": "the model completes text at its end only",
    "functions": "it is the form of before tools; send tools",
    "function_call": "it is the form of before tools; send tool_choice",
    "documents": "put them into a message",
    "audio": "the model writes text only",
    "background": "set stream, or ask from a thread of your own",
    "conversation": "go on with previous_response_id",
    "context_management": "prompts are not cut; shorten the input",
    "moderation": "this server does not judge texts",
}
"""Field to the reason why it is refused where it asks for something."""


class LoadLoRAAdapterRequest(ModelRequest, kw_only=True):
    """An adapter that is to be offered."""

    lora_name: str | None = None
    lora_path: str | None = None


class UnloadLoRAAdapterRequest(ModelRequest, kw_only=True):
    """An adapter that is to be offered no more."""

    lora_name: str | None = None


_INCLUDED = frozenset({"reasoning.encrypted_content"})
"""What clients ask to be included as a matter of course; here thoughts come as plain text, always."""


def reject_unsupported_fields(request: ModelRequest) -> None:
    """Refuses what is known but cannot be honoured. Empty values ask for nothing.

    Raises:
        RequestError: Names the field and the reason.
    """
    if not isinstance(request, GenerationRequest | ResponsesRequest):
        return  # the names are fields of other requests, too
    for name, reason in _UNSUPPORTED.items():
        if getattr(request, name, None) not in (None, "", [], {}, False, "none"):
            raise RequestError(f"{name} is not supported: {reason}.", parameter=name)
    if isinstance(request, ResponsesRequest):
        _reject_unsupported_of_responses(request)
    if isinstance(request, ChatCompletionRequest) and set(request.modalities or ()) - {"text"}:
        raise RequestError("modalities: the model writes text only.", parameter="modalities")


def _reject_unsupported_of_responses(request: ResponsesRequest) -> None:
    if request.prompt:
        raise RequestError("prompt is not supported: no templates are kept here; send input.", parameter="prompt")
    unknown = [name for name in request.include or () if name not in _INCLUDED]
    if unknown:
        raise RequestError(f"include: {ascii(unknown[0])[:60]} is not supported.", parameter="include")
    if request.top_logprobs:
        raise RequestError(
            "top_logprobs is not supported here: send the request to /v1/chat/completions.", parameter="top_logprobs"
        )
    if request.truncation not in (None, "disabled"):
        raise RequestError(
            "truncation must be 'disabled': prompts are not cut; shorten the input.", parameter="truncation"
        )
