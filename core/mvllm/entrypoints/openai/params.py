"""From the fields of a request to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.entrypoints.openai.output_form import OutputForm
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
)


def completion_params(
    request: CompletionRequest, defaults: Mapping[str, Any], form: OutputForm | None = None
) -> SamplingParams:
    """How to answer a completion request.

    Args:
        defaults: What the model's own settings say, by field.
        form: What the output must look like.

    Raises:
        RequestError: A value is out of its range.
    """
    given = _given(request, defaults, form)
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            given["prompt_logprobs"] = request.logprobs
    if request.echo and request.max_tokens == 0:  # the prompt alone is wanted; the engine always adds a token
        given["max_tokens"] = 1
    return SamplingParams(**given)


def chat_params(
    request: ChatCompletionRequest, defaults: Mapping[str, Any], form: OutputForm | None = None
) -> SamplingParams:
    """How to answer a chat request. Without a limit, an answer may be as long as the context has room for.

    Raises:
        RequestError: A value is out of its range.
    """
    given = _given(request, {"max_tokens": None, **defaults}, form)
    if request.max_completion_tokens is not None:
        given["max_tokens"] = request.max_completion_tokens
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", parameter="top_logprobs")
    return SamplingParams(**given)


def _given(request: GenerationRequest, defaults: Mapping[str, Any], form: OutputForm | None) -> dict[str, Any]:
    given = {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}
    if form is not None:
        given["structured_outputs"] = form.params
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return {**defaults, **given, "output_kind": kind}
