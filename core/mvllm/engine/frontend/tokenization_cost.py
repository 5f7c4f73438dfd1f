"""Estimates whether a prompt is tokenized fast enough in the thread of an event loop."""

from __future__ import annotations

from collections.abc import Iterable

from mvllm.messages.sampling_params import SamplingParams

_MAX_INLINE_TEXT_CHARS = 4096  # tokenized in the loop's thread: passing a shorter text to another thread is slower
_MAX_INLINE_TOKEN_IDS = 1 << 16


def total_cost(prompts: Iterable[object], params: Iterable[object]) -> float:
    """`tokenization_cost` of prompts and of the negative prompts of their parameters."""
    negative = [each.negative_prompt for each in params if isinstance(each, SamplingParams) and each.negative_prompt]
    return sum(map(tokenization_cost, (*prompts, *negative)))


def tokenization_cost(prompt: object) -> float:
    """Size of a prompt, relative to the largest one that is validated and tokenized in the loop's thread."""
    if isinstance(prompt, dict):
        ids = prompt.get("prompt_token_ids")
        prompt = ids if ids is not None else prompt.get("prompt")
    try:
        length = len(prompt)  # type: ignore[arg-type]
    except TypeError:
        return 0.0  # the input processor rejects it
    return length / (_MAX_INLINE_TEXT_CHARS if isinstance(prompt, str) else _MAX_INLINE_TOKEN_IDS)


def num_text_chars(prompts: Iterable[object]) -> int:
    """Characters of the prompts that are texts. They need not be valid."""
    texts = (prompt.get("prompt") if isinstance(prompt, dict) else prompt for prompt in prompts)
    return sum(len(text) for text in texts if isinstance(text, str))
