"""Fields that requests of many kinds have, and those of other engines that are refused by name.

An unknown field is only reported, so a field that would change the result must be known to be refused: its type says
so (`Unsupported`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class Unsupported:
    """Annotation of a field that `reject_unsupported_fields` refuses.

    Args:
        reason: Why, or what to send instead.
        neutral: Values that ask for nothing, beside null, false and empty ones.
        is_switch: Whether null is the only value beside `neutral` that asks for nothing.
    """

    def __init__(self, reason: str, *neutral: Any, is_switch: bool = False) -> None:
        self.reason = reason
        self.neutral = neutral
        self._is_switch = is_switch

    def refuses(self, value: object) -> bool:
        """Whether a request with this value is refused."""
        if value is None or (not self._is_switch and (value is False or value in ("", [], {}))):
            return False
        return value not in self.neutral


class ModelRequest(msgspec.Struct, kw_only=True):
    """A request with a model name."""

    model: str | None = None


class ClientRequest(ModelRequest, kw_only=True):
    """A request with the fields that clients of OpenAI's API and of other engines send and that have no effect here:
    labels for the client's own records, and hints for services with many tenants."""

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


_SAMPLER = "the server has no such sampler; send temperature, top_p, top_k or min_p"
_ACTIVATION = Unsupported("send use_activation", True, is_switch=True)
_MEDIA = Unsupported("send mm_processor_kwargs, such as num_frames or fps")
_TEMPLATE = Unsupported("texts are compared as the model's files say; put an instruction into the query")


class ForeignGenerationFields(ClientRequest, kw_only=True):
    """Fields of requests that generate text."""

    # vLLM
    logprob_token_ids: Annotated[
        Any, Unsupported("send logprobs with as many alternatives as needed, or allowed_token_ids")
    ] = None
    watermarking: Annotated[Any, Unsupported("outputs are not watermarked")] = None
    repetition_detection: Annotated[Any, Unsupported("send repetition_penalty, frequency_penalty or stop")] = None
    ec_transfer_params: Annotated[
        Any, Unsupported("outputs of encoders are not transferred between engines by requests")
    ] = None
    media_io_kwargs: Annotated[Any, _MEDIA] = None
    guided_whitespace_pattern: Annotated[Any, Unsupported("send structured_outputs with whitespace_pattern")] = None

    # llama.cpp and servers around it
    n_predict: Annotated[Any, Unsupported("send max_tokens", -1)] = None
    n_probs: Annotated[Any, Unsupported("send logprobs", 0)] = None
    t_max_predict_ms: Annotated[Any, Unsupported("send max_tokens", 0, -1)] = None
    lora: Annotated[Any, Unsupported("name the adapter by model")] = None
    samplers: Annotated[Any, Unsupported("the order of samplers is fixed")] = None
    repeat_penalty: Annotated[Any, Unsupported("send repetition_penalty", 1)] = None
    typical_p: Annotated[Any, Unsupported(_SAMPLER, 1, 0)] = None
    tfs_z: Annotated[Any, Unsupported(_SAMPLER, 1)] = None
    top_a: Annotated[Any, Unsupported(_SAMPLER, 0)] = None
    top_n_sigma: Annotated[Any, Unsupported(_SAMPLER, -1, 0)] = None
    mirostat: Annotated[Any, Unsupported(_SAMPLER, 0)] = None
    dynatemp_range: Annotated[Any, Unsupported(_SAMPLER, 0)] = None
    xtc_probability: Annotated[Any, Unsupported(_SAMPLER, 0)] = None
    dry_multiplier: Annotated[Any, Unsupported(_SAMPLER, 0)] = None
    smoothing_factor: Annotated[Any, Unsupported(_SAMPLER, 0)] = None
    reasoning_format: Annotated[
        Any,
        Unsupported(
            "the server's --reasoning-parser decides; include_reasoning=false leaves the reasoning out",
            "auto",
            "deepseek",
        ),
    ] = None

    # SGLang
    no_stop_trim: Annotated[Any, Unsupported("send include_stop_str_in_output")] = None
    stop_regex: Annotated[Any, Unsupported("send stop")] = None
    lora_path: Annotated[Any, Unsupported("name the adapter by model")] = None
    custom_logit_processor: Annotated[
        Any, Unsupported("the server runs no code from requests; start it with --logits-processors")
    ] = None
    return_hidden_states: Annotated[Any, Unsupported("send the text to /pooling with task='token_embed'")] = None
    separate_reasoning: Annotated[Any, Unsupported("the server's --reasoning-parser decides", True, is_switch=True)] = (
        None
    )

    # OpenAI's service
    web_search_options: Annotated[
        Any, Unsupported("the server searches nothing; send tools that the client runs", is_switch=True)
    ] = None
    verbosity: Annotated[Any, Unsupported("describe the length in a message", "medium")] = None


class ForeignPoolingFields(ClientRequest, kw_only=True):
    """Fields of requests for embeddings, classes, scores and ranks."""

    padding: Annotated[Any, Unsupported("prompts are not padded", "do_not_pad")] = None
    media_io_kwargs: Annotated[Any, _MEDIA] = None
    data: Annotated[Any, Unsupported("send input or messages")] = None
    softmax: Annotated[Any, _ACTIVATION] = None
    activation: Annotated[Any, _ACTIVATION] = None


class ForeignPairFields(ForeignPoolingFields, kw_only=True):
    """Fields of requests that compare texts."""

    mm_processor_kwargs: Annotated[Any, Unsupported("images of scores are processed as the model's files say")] = None
    chat_template: Annotated[Any, _TEMPLATE] = None
    instruct: Annotated[Any, _TEMPLATE] = None
    instruction: Annotated[Any, _TEMPLATE] = None
    rank_fields: Annotated[Any, Unsupported("send the text to rank as document")] = None
    max_chunks_per_doc: Annotated[Any, Unsupported("send max_tokens_per_doc")] = None
