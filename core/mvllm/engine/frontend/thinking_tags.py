"""Converts the tags around a model's thoughts to token ids, and finds them at the end of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.errors import RequestError
from mvllm.messages.sampling_params import SamplingParams
from mvllm.messages.thinking import DEFAULT_TAGS, ThinkingTokens

_PROMPT_TAIL = 64
"""Tokens at the end of a prompt in which its last tag is looked for."""

_PROMPT_TAIL_CHARACTERS = 1024
"""The same in characters, of a prompt that is text."""

_LINE_BREAKS = ("\n", "\n\n")
"""Texts after a tag that tokenizers join with its last character, if the tag is not a special token."""

_MOST_PROMPT_THOUGHTS = 8192
"""Tokens at the end of a prompt that are searched for thoughts that it leaves open."""

_FOLLOWING = (*_LINE_BREAKS, "a", "A", "_", "1", " ", '"', "</")
"""Texts after the beginning of a tool call, such as the name of a function."""


def thinking_tokens_of(tags: Sequence[str], tokenizer: Tokenizer) -> ThinkingTokens:
    """Tokenizes tags.

    Args:
        tags: As in `SamplingParams.thinking_tags`.

    Raises:
        RequestError: A tag has no tokens.
    """
    start, end, *more = tags
    return ThinkingTokens(
        starts=_tokenizations(start, tokenizer) if start else [],
        ends=_tokenizations(end, tokenizer),
        forced=_encode([more[0] if more else end], tokenizer)[0],
        implicit_ends=[_beginning(text, tokenizer) for text in more[1:]],
    )


def fit_thinking_to_prompt(
    params: SamplingParams, text: str | None, token_ids: Sequence[int], tokenizer: Tokenizer | None
) -> SamplingParams:
    """Adapts `thinking_tokens` to whether a prompt opens or closes the thoughts at its end, or ends within thoughts.

    Args:
        params: Not modified.
        text: The prompt, if known.
        token_ids: Its token ids.

    Returns:
        `params`, or a copy: without `starts` if the prompt opens the thoughts, without a budget if it closes them.
    """
    tokens = params.thinking_tokens
    if params.thinking_token_budget is None or tokens is None:
        return params
    opened = any(_ends_with(token_ids, marker) for marker in tokens.starts)
    closed = not opened and any(_ends_with(token_ids, marker) for marker in tokens.ends)
    if tokenizer is not None and not opened and not closed:
        if text is None:
            text = tokenizer.decode(token_ids[-_PROMPT_TAIL:], skip_special_tokens=False)
        tail = text[-_PROMPT_TAIL_CHARACTERS:]
        start, end = (params.thinking_tags or DEFAULT_TAGS)[:2]
        opened, closed = (bool(tag.strip()) and tail.rstrip().endswith(tag.strip()) for tag in (start, end))
    if not opened and not closed:
        opened = _leaves_open(token_ids, tokens, frozenset() if tokenizer is None else tokenizer.special_ids)
    if closed:
        return msgspec.structs.replace(params, thinking_token_budget=None)
    if opened and tokens.starts:
        return msgspec.structs.replace(params, thinking_tokens=msgspec.structs.replace(tokens, starts=[]))
    return params


def _leaves_open(token_ids: Sequence[int], tokens: ThinkingTokens, special_ids: frozenset[int]) -> bool:
    """Whether a prompt ends within thoughts: after an opening tag that neither a closing tag nor a special token, which
    begins another message, follows."""
    starts, ends = tokens.starts, [*tokens.ends, *tokens.implicit_ends]
    last_ids = {marker[-1] for marker in (*starts, *ends)} | special_ids
    for stop in range(len(token_ids), max(0, len(token_ids) - _MOST_PROMPT_THOUGHTS), -1):
        if token_ids[stop - 1] in last_ids:
            tail = token_ids[max(0, stop - _PROMPT_TAIL) : stop]
            is_start = any(_ends_with(tail, marker) for marker in starts)
            if is_start or token_ids[stop - 1] in special_ids or any(_ends_with(tail, marker) for marker in ends):
                return is_start
    return False


def _ends_with(token_ids: Sequence[int], marker: list[int]) -> bool:
    return list(token_ids[-len(marker) :]) == marker


def _tokenizations(tag: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The tag's token ids; if they are several, also those at the end of a line, and of the first word of a text."""
    texts = [tag, *(tag + after for after in _LINE_BREAKS)]
    found, *others = _encode(texts, tokenizer)
    known = [found]
    if len(found) > 1:
        for ids in [*others, *tokenizer.encode_batch(texts, add_special_tokens=False)]:
            if not any(ids[: len(each)] == each for each in known):
                known.append(ids)
    return known


def _beginning(text: str, tokenizer: Tokenizer) -> list[int]:
    """The token ids with which `text` begins whatever follows it: its last characters may be part of another token."""
    plain, *others = _encode([text, *(text + after for after in _FOLLOWING)], tokenizer)
    num_common = next((i for i, ids in enumerate(zip(plain, *others, strict=False)) if len(set(ids)) > 1), len(plain))
    return plain[:num_common] or plain


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    encoded = tokenizer.encode_within(texts)
    for text, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise RequestError(f"thinking_tags: {ascii(text)[:60]} has no token ids.", parameter="thinking_tags")
    return encoded
