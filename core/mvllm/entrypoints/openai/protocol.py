"""Request bodies: the fields of the OpenAI API, and those that vLLM and similar engines have added.

msgspec decodes a body into one of these structs and checks the types of its fields. Every field may be null, as if it
had not been sent. A field falls into one of four groups:

    used           most fields
    no effect      fields that clients always send and that need no action (`ClientRequest`)
    unsupported    known fields that would change the result; they are rejected (`client_request.Unsupported`)
    unknown        no struct has the field; it is reported (`unknown_fields.py`)

`EXAMPLE` is a body for the description of the API.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from mvllm.entrypoints.openai.client_request import (
    ForeignGenerationFields,
    ForeignPairFields,
    ForeignPoolingFields,
    ModelRequest,
    Unsupported,
)

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`, and of `reasoning.effort` in the Responses API."""

AnyList = Annotated[list[Any], msgspec.Meta(extra_json_schema={"items": {}})]
"""A list of anything. Generators of clients want `items` of every list."""

_TEXT = "The capital of France is Paris."


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no effect


class GenerationRequest(ForeignGenerationFields, kw_only=True):
    """Fields of completion and chat completion requests.

    Sampling parameters have the names of `SamplingParams`, which checks their values.
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
    truncation_side: str | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    vllm_xargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    guidance_scale: float | None = None
    negative_prompt: str | list[int] | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    # Deprecated forms of structured_outputs.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # Other engines' names of the constraints of structured_outputs.
    json_schema: Any = None
    grammar: Any = None
    regex: Any = None
    ebnf: Any = None

    logits_processors: Annotated[
        Any, Unsupported("the server runs no code from requests; start it with --logits-processors", 0, "none")
    ] = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/completions`.

    Attributes:
        prompt: A text, a list of texts, a list of token ids, or a list of those.
        logprobs: Number of alternatives to report for each token; 0 reports only the token.
        prompt_embeds: Base64 of a file with embeddings [tokens, hidden_size], or several: of numpy (`.npy`),
            or safetensors with one tensor. Each is a prompt, before those of `prompt`.
    """

    EXAMPLE: ClassVar[dict[str, Any]] = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}
    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: str | list[str] | None = None
    logprobs: int | None = None
    suffix: Annotated[str | None, Unsupported("fill-in-the-middle is not implemented; send only prompt", "none")] = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`.

    Attributes:
        logprobs: Whether to report log-probabilities, `top_logprobs` alternatives for each token.
        max_completion_tokens: Takes precedence over `max_tokens`; without both, the limit is `max_model_len`.
        messages: A content is a text or a list of parts: `text`, `image_url`, `input_audio`, `video_url`.
        reasoning_effort: One of `REASONING_EFFORTS`. The chat template gets it, and whether to reason.
        mm_processor_kwargs: Arguments of the model's processor of images, audio and videos.
        return_prompt_text: Report the rendered prompt as `prompt_text`.
    """

    EXAMPLE: ClassVar[dict[str, Any]] = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[dict[str, Any]] | None, Unsupported("it is deprecated; send tools")] = None
    function_call: Annotated[str | dict[str, Any] | None, Unsupported("it is deprecated; send tool_choice", "none")] = (
        None
    )
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[dict[str, Any]] | None, Unsupported("put them into a message")] = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = None
    modalities: list[str] | None = None
    audio: Annotated[Any, Unsupported("the server generates only text; omit the field", 0, "none")] = None


class TranscriptionRequest(ModelRequest, kw_only=True):
    """Fields of the forms of `POST /v1/audio/transcriptions` and `/v1/audio/translations`, beside `file`.

    Attributes:
        language: Code of the audio's language, such as `en`; it is detected without one.
        prompt: Text before the audio, for names and style.
        response_format: `json`, the default, `text`, `srt`, `vtt` or `verbose_json`.
        timestamp_granularities: `segment`.
        max_completion_tokens: Most tokens of a segment.
    """

    language: str | None = None
    prompt: str | None = None
    response_format: str | None = None
    temperature: float | None = None
    timestamp_granularities: list[str] | None = None
    stream: bool | None = None
    seed: int | None = None
    max_completion_tokens: int | None = None


class InputListRequest(ForeignPoolingFields, kw_only=True):
    """Fields of pooling requests with a list of inputs, or with a conversation.

    Attributes:
        input: A text, a list of texts, a list of token ids, or a list of those.
        messages: A conversation in place of `input`, as of `POST /v1/chat/completions`: one prompt.
        add_generation_prompt: End the prompt of a conversation with the header of an assistant message; false by
            default.
        add_special_tokens: Whether the tokenizer adds its special tokens: by default to inputs, and not to prompts of
            conversations, which have those of the chat template.
        truncate_prompt_tokens: Truncate longer inputs to this many tokens; -1 for the model's limit.
        truncation_side: Only `right`: the first tokens are kept.
    """

    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class EmbeddingRequest(InputListRequest, kw_only=True):
    """Body of `POST /v1/embeddings`.

    Attributes:
        encoding_format: `float` (the default) for numbers, `base64` for the bytes of little-endian float32.
        dimensions: Number of leading components to keep.
        embed_dtype: Type of the numbers in base64: `float32` (the default), `float16` or `bfloat16`.
        endianness: Byte order of the numbers in base64: `little` (the default), `big` or `native`.
        normalize: Scale embeddings to length 1; by default as configured in the model's files.
        use_activation: Another name of `normalize`; for the scores of a classifier see PoolingRequest.
    """

    EXAMPLE: ClassVar[dict[str, Any]] = {"input": [_TEXT], "encoding_format": "float"}
    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """Body of `POST /pooling`.

    Attributes:
        task: `embed`, `token_embed` or `classify`; by default the model's task.
        pooling_type: How hidden states are pooled; by default as configured by the model. `all` is `token_embed`.
        use_activation: Turn the scores of a classifier into probabilities.
    """

    EXAMPLE: ClassVar[dict[str, Any]] = {"input": _TEXT}
    task: str | None = None
    pooling_type: str | None = None


class ClassificationRequest(InputListRequest, kw_only=True):
    """Body of `POST /classify`.

    Attributes:
        use_activation: Turn the scores of the classifier into probabilities; true by default.
    """

    EXAMPLE: ClassVar[dict[str, Any]] = {"input": _TEXT}
    use_activation: bool | None = None


class TextPairRequest(ForeignPairFields, kw_only=True):
    """Fields of requests that compare texts.

    Attributes:
        use_activation: As in ClassificationRequest.
        truncate_prompt_tokens: Truncate a prompt, which for a cross-encoder is both texts together.
    """

    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


class ContentParts(msgspec.Struct, kw_only=True):
    """An input with images: parts, as of a message."""

    content: list[dict[str, Any] | str]


ScoreField = str | ContentParts | list[str | ContentParts] | None


class ScoreRequest(TextPairRequest, kw_only=True):
    """Body of `POST /score`.

    Attributes:
        text_1, queries: A text or an object with `content`, or one for each of `text_2`. Aliases of one field.
        text_2, documents: A text or an object with `content`, or a list of these. Aliases of one field.
    """

    EXAMPLE: ClassVar[dict[str, Any]] = {"text_1": "What is the capital of France?", "text_2": [_TEXT]}
    text_1: ScoreField = None
    text_2: ScoreField = None
    queries: ScoreField = None
    documents: ScoreField = None


class Document(msgspec.Struct, kw_only=True):
    """A document: its text, as Cohere's clients send it, or parts, as of a message."""

    text: str | None = None
    content: list[dict[str, Any] | str] | None = None


class RerankRequest(TextPairRequest, kw_only=True):
    """Body of `POST /rerank`.

    Attributes:
        query: The text that documents are compared with, or an object with `content`.
        documents: Texts, or objects with a text or `content`.
        top_n: Number of results; 0 or null for all.
        return_documents: Repeat the documents in the results; true by default.
        max_tokens_per_doc: Tokens of each document that are used; by default all.
    """

    EXAMPLE: ClassVar[dict[str, Any]] = {
        "query": "What is the capital of France?",
        "documents": [_TEXT, "Rome is in Italy."],
    }
    query: str | ContentParts | None = None
    documents: list[str | Document] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None


class TokenizeRequest(ModelRequest, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or messages to render with the chat template."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"prompt": _TEXT, "return_token_strs": True}
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(ModelRequest, kw_only=True):
    """Body of `POST /detokenize`."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"tokens": [1, 2, 3]}
    tokens: list[int] | None = None


class LoadLoRAAdapterRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"lora_name": "poems", "lora_path": "adapters/poems"}
    lora_name: str | None = None
    lora_path: str | None = None


class UnloadLoRAAdapterRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"lora_name": "poems"}
    lora_name: str | None = None


class UpdateLoRAAdapterRequest(ModelRequest, kw_only=True):
    """Body of `POST /v1/update_lora_adapter`. Without a path, the present folder is read again."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"lora_name": "poems"}
    lora_name: str | None = None
    lora_path: str | None = None


class InitWeightTransferRequest(ModelRequest, kw_only=True):
    """Body of `POST /init_weight_transfer_engine`."""

    EXAMPLE: ClassVar[dict[str, Any]] = {
        "init_info": {"master_address": "10.0.0.1", "master_port": 29600, "world_size": 2},
    }
    init_info: dict[str, Any] | None = None


class UpdateWeightsRequest(ModelRequest, kw_only=True):
    """Body of `POST /update_weights`: `path`, `shared_memory`, or `names`, `dtype_names` and `shapes`."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"update_info": {"path": "checkpoints/step-100"}}
    update_info: dict[str, Any] | None = None


class FinishWeightUpdateRequest(ModelRequest, kw_only=True):
    """Body of `POST /finish_weight_update`."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"weight_version": 100}
    weight_version: int | None = None
    reset_running_requests: bool | None = None


class CollectiveRpcRequest(ModelRequest, kw_only=True):
    """Body of `POST /collective_rpc`."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"method": "name_of_a_method", "args": []}
    method: str | None = None
    args: AnyList | None = None
    kwargs: dict[str, Any] | None = None
    timeout: Any = None  # no effect: the server's limits apply
