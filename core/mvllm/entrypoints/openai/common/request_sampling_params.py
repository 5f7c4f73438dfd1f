"""From the fields of a request to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.entrypoints.openai.common.output_constraint import OutputConstraint
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from mvllm.errors import RequestError
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

_SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "truncate_prompt_tokens",
    "use_beam_search",
    "beam_width",
    "length_penalty",
    "early_stopping",
)
_RANDOM_SAMPLING_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
"""What a model's own settings say about sampling, which is nothing to a search."""


def completion_sampling_params(
    request: CompletionRequest, defaults: Mapping[str, Any], form: OutputConstraint | None = None
) -> SamplingParams:
    """How to answer a completion request.

    Args:
        defaults: What the model's own settings say, by field.
        form: What the output must look like.

    Raises:
        RequestError: A value is out of its range.
    """
    given = _collect_fields(request, defaults, form)
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            given["prompt_logprobs"] = request.logprobs
    if request.echo and request.max_tokens == 0:  # the prompt alone is wanted; the engine always adds a token
        given["max_tokens"] = 1
    return _validate(request, given)


def chat_sampling_params(
    request: ChatCompletionRequest, defaults: Mapping[str, Any], form: OutputConstraint | None = None
) -> SamplingParams:
    """How to answer a chat request. Without a limit, an answer may be as long as the context has room for.

    Raises:
        RequestError: A value is out of its range.
    """
    given = _collect_fields(request, {"max_tokens": None, **defaults}, form)
    if request.max_completion_tokens is not None:
        given["max_tokens"] = request.max_completion_tokens
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", parameter="top_logprobs")
    return _validate(request, given)


def _collect_fields(
    request: GenerationRequest, defaults: Mapping[str, Any], form: OutputConstraint | None
) -> dict[str, Any]:
    given = {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}
    if form is not None:
        given["structured_outputs"] = form.params
    if request.vllm_xargs is not None:
        given["extra_args"] = request.vllm_xargs
    if request.use_beam_search:
        defaults = {name: value for name, value in defaults.items() if name not in _RANDOM_SAMPLING_FIELDS}
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return {**defaults, **given, "output_kind": kind}


def _validate(request: GenerationRequest, given: dict[str, Any]) -> SamplingParams:
    try:
        params = SamplingParams(**given)
    except RequestError as e:
        if e.parameter != "extra_args":
            raise
        raise RequestError(str(e).replace("extra_args", "vllm_xargs", 1), parameter="vllm_xargs") from e
    if request.stream and params.is_ranked:
        name = "use_beam_search" if params.use_beam_search else "best_of"
        raise RequestError(
            f"{name} chooses among whole answers, so there is nothing to stream. Send it without stream"
            + ("." if params.use_beam_search else ", or equal to n."),
            parameter=name,
        )
    return params
