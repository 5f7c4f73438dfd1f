"""Requests for other token spaces than text."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.config.token_spaces import TokenSpace
from mvllm.errors import RequestError
from mvllm.messages.field_checks import reject
from mvllm.messages.sampling_params import TEXT, SamplingParams


def space_of(model: ModelConfig, params: SamplingParams) -> TokenSpace | None:
    """The space that `params` names; None for text.

    Raises:
        RequestError: The model has no such space.
    """
    if params.token_space == TEXT:
        return None
    space = model.token_spaces.get(params.token_space)
    if space is None:
        names = ", ".join(repr(name) for name in (TEXT, *model.token_spaces))
        reject("token_space", params.token_space, f"one of the spaces of the model {model.model}: {names}")
    return space


def complete_space_params(model: ModelConfig, params: SamplingParams, *, has_drafts: bool) -> None:
    """Completes the parameters of a request for another space than text, in place.

    Raises:
        RequestError: The model or the engine does not support it, or another parameter excludes it.
    """
    space = space_of(model, params)
    if space is None:
        return
    if has_drafts:
        raise RequestError(
            f"token_space={space.name!r} cannot be combined with speculative decoding, which proposes text.",
            parameter="token_space",
        )
    for name in ("stop", "structured_outputs", "bad_words", "thinking_token_budget"):
        if getattr(params, name):
            reject(name, getattr(params, name), f"unset when token_space is {space.name!r}: it concerns text")
    params.ignore_eos = True
    params.detokenize = False
    if params.max_tokens is None:
        params.max_tokens = space.num_tokens
