"""SamplingParams from the fields of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.entrypoints.openai.common.output_constraint import OutputConstraint
from mvllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from mvllm.errors import RequestError
from mvllm.messages.field_checks import reject
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams

_SHARED_FIELDS = tuple(
    name
    for name in GenerationRequest.__struct_fields__
    if name in SamplingParams.__struct_fields__
    and name not in ("structured_outputs", "logits_processors")  # see OutputConstraint; the server runs no functions
)
_RANDOM_SAMPLING_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
"""Defaults of the model that do not apply to beam search."""


def completion_sampling_params(
    request: CompletionRequest, defaults: Mapping[str, Any], constraint: OutputConstraint | None = None
) -> SamplingParams:
    """Sampling parameters of a completion request.

    Args:
        defaults: The model's default parameters.
        constraint: Structured output that the request asks for.

    Raises:
        RequestError: A value is out of its range.
    """
    given = _collect_fields(request, defaults, constraint)
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            given["prompt_logprobs"] = request.logprobs
    if request.echo and request.max_tokens == 0:  # the response has only the prompt, but the engine generates a token
        given["max_tokens"] = 1
    return _validate(request, given)


def chat_sampling_params(
    request: ChatCompletionRequest, defaults: Mapping[str, Any], constraint: OutputConstraint | None = None
) -> SamplingParams:
    """Sampling parameters of a chat request. Without max_tokens the context is the limit.

    Raises:
        RequestError: A value is out of its range.
    """
    given = _collect_fields(request, {"max_tokens": None, **defaults}, constraint)
    if request.max_completion_tokens is not None:
        given["max_tokens"] = request.max_completion_tokens
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", parameter="top_logprobs")
    return _validate(request, given)


def _collect_fields(
    request: GenerationRequest, defaults: Mapping[str, Any], constraint: OutputConstraint | None
) -> dict[str, Any]:
    given = {name: value for name in _SHARED_FIELDS if (value := getattr(request, name)) is not None}
    if constraint is not None:
        given["structured_outputs"] = constraint.params
    if request.vllm_xargs is not None:
        given["extra_args"] = request.vllm_xargs
    if request.kv_transfer_params is not None:
        given["extra_args"] = {**(request.vllm_xargs or {}), "kv_transfer_params": request.kv_transfer_params}
    if request.use_beam_search:
        defaults = {name: value for name, value in defaults.items() if name not in _RANDOM_SAMPLING_FIELDS}
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return {**defaults, **given, "output_kind": kind}


def _validate(request: GenerationRequest, given: dict[str, Any]) -> SamplingParams:
    if given.get("max_tokens") == 0:
        reject("max_tokens", 0, "at least 1, or 0 in a completion with echo")
    try:
        params = SamplingParams(**given)
    except RequestError as e:
        if e.parameter != "extra_args":
            raise
        name = "vllm_xargs" if request.vllm_xargs is not None else "kv_transfer_params"
        raise RequestError(str(e).replace("extra_args", name, 1), parameter=name) from e
    if request.stream and params.is_ranked:
        name = "use_beam_search" if params.use_beam_search else "best_of"
        raise RequestError(
            f"{name} chooses among finished outputs, which cannot be streamed. Send it without stream"
            + ("." if params.use_beam_search else ", or equal to n."),
            parameter=name,
        )
    return params
