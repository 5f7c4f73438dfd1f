"""Request fields of other engines that would change the result and are not done here: they are refused by name.

An unknown field is only reported, so a field that would change the result must be known to be refused. Each struct is a
base of the requests that have its fields. `Unsupported` says for each field which values ask for nothing, and why
others are refused or what to send instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mvllm.entrypoints.openai.client_request import ClientRequest


@dataclass(frozen=True)
class Unsupported:
    """How a field is refused.

    Attributes:
        reason: The reason, or what to do instead.
        neutral: Values that change nothing, beside null, false and empty ones.
        is_switch: Whether null is the only value beside `neutral` that changes nothing.
    """

    reason: str
    neutral: tuple[Any, ...] = ()
    is_switch: bool = False

    def is_refused(self, value: object) -> bool:
        """Whether a request with this value is refused."""
        if value is None or (not self.is_switch and (value is False or value in ("", [], {}))):
            return False
        return value not in self.neutral


class ForeignGenerationFields(ClientRequest, kw_only=True):
    """Fields of requests that generate text."""

    # vLLM
    logprob_token_ids: Any = None
    watermarking: Any = None
    repetition_detection: Any = None
    ec_transfer_params: Any = None
    media_io_kwargs: Any = None
    guided_whitespace_pattern: Any = None

    # llama.cpp and servers around it
    n_predict: Any = None
    n_probs: Any = None
    t_max_predict_ms: Any = None
    lora: Any = None
    samplers: Any = None
    repeat_penalty: Any = None
    typical_p: Any = None
    tfs_z: Any = None
    top_a: Any = None
    top_n_sigma: Any = None
    mirostat: Any = None
    dynatemp_range: Any = None
    xtc_probability: Any = None
    dry_multiplier: Any = None
    smoothing_factor: Any = None
    reasoning_format: Any = None

    # SGLang
    no_stop_trim: Any = None
    stop_regex: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    separate_reasoning: Any = None

    # OpenAI's service
    web_search_options: Any = None
    verbosity: Any = None


class ForeignPoolingFields(ClientRequest, kw_only=True):
    """Fields of requests for embeddings, classes, scores and ranks."""

    padding: Any = None
    media_io_kwargs: Any = None
    data: Any = None
    softmax: Any = None
    activation: Any = None


class ForeignPairFields(ForeignPoolingFields, kw_only=True):
    """Fields of requests that compare texts."""

    mm_processor_kwargs: Any = None
    chat_template: Any = None
    instruct: Any = None
    instruction: Any = None
    rank_fields: Any = None
    max_chunks_per_doc: Any = None


_SAMPLER = "the server has no such sampler; send temperature, top_p, top_k or min_p"
_ACTIVATION = Unsupported("send use_activation", (True,), is_switch=True)
_TEMPLATE = Unsupported("texts are compared as the model's files say; put an instruction into the query")

UNSUPPORTED_FIELDS = {
    "logprob_token_ids": Unsupported("send logprobs with as many alternatives as needed, or allowed_token_ids"),
    "watermarking": Unsupported("outputs are not watermarked"),
    "repetition_detection": Unsupported("send repetition_penalty, frequency_penalty or stop"),
    "ec_transfer_params": Unsupported("outputs of encoders are not transferred between engines by requests"),
    "media_io_kwargs": Unsupported("send mm_processor_kwargs, such as num_frames or fps"),
    "guided_whitespace_pattern": Unsupported("send structured_outputs with whitespace_pattern"),
    "t_max_predict_ms": Unsupported("send max_tokens", (0, -1)),
    "lora": Unsupported("name the adapter by model"),
    "n_predict": Unsupported("send max_tokens", (-1,)),
    "n_probs": Unsupported("send logprobs", (0,)),
    "samplers": Unsupported("the order of samplers is fixed"),
    "repeat_penalty": Unsupported("send repetition_penalty", (1,)),
    "typical_p": Unsupported(_SAMPLER, (1, 0)),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
    "top_a": Unsupported(_SAMPLER, (0,)),
    "top_n_sigma": Unsupported(_SAMPLER, (-1, 0)),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "dynatemp_range": Unsupported(_SAMPLER, (0,)),
    "xtc_probability": Unsupported(_SAMPLER, (0,)),
    "dry_multiplier": Unsupported(_SAMPLER, (0,)),
    "smoothing_factor": Unsupported(_SAMPLER, (0,)),
    "reasoning_format": Unsupported(
        "the server's --reasoning-parser decides; include_reasoning=false leaves the reasoning out",
        ("auto", "deepseek"),
    ),
    "no_stop_trim": Unsupported("send include_stop_str_in_output"),
    "stop_regex": Unsupported("send stop"),
    "lora_path": Unsupported("name the adapter by model"),
    "custom_logit_processor": Unsupported("the server runs no code from requests; start it with --logits-processors"),
    "return_hidden_states": Unsupported("send the text to /pooling with task='token_embed'"),
    "separate_reasoning": Unsupported("the server's --reasoning-parser decides", (True,), is_switch=True),
    "web_search_options": Unsupported("the server searches nothing; send tools that the client runs", is_switch=True),
    "verbosity": Unsupported("describe the length in a message", ("medium",)),
    "padding": Unsupported("prompts are not padded", ("do_not_pad",)),
    "softmax": _ACTIVATION,
    "activation": _ACTIVATION,
    "mm_processor_kwargs": Unsupported("images of scores are processed as the model's files say"),
    "chat_template": _TEMPLATE,
    "instruct": _TEMPLATE,
    "instruction": _TEMPLATE,
    "rank_fields": Unsupported("send the text to rank as document"),
    "max_chunks_per_doc": Unsupported("send max_tokens_per_doc"),
    "data": Unsupported("send input or messages"),
}
"""The fields of the structs above."""

FOREIGN_FIELDS = {
    each: [name for name in each.__struct_fields__ if name not in ClientRequest.__struct_fields__]
    for each in (ForeignGenerationFields, ForeignPoolingFields, ForeignPairFields)
}
"""The structs above, with the names of their fields."""
