"""Estimates whether a prompt is tokenized fast enough in the thread of an event loop."""

from __future__ import annotations

_MAX_INLINE_TEXT_CHARS = 4096  # tokenized in the loop's thread: passing a shorter text to another thread is slower
_MAX_INLINE_TOKEN_IDS = 1 << 16


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
