"""Where the thoughts of a reasoning model begin and end in its output: tags as texts and as token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from mvllm.messages.field_checks import is_unicode, reject, token_ids

MAX_TAG = 256
"""Characters of an opening or closing tag."""

MAX_FORCED_TEXT = 4096
"""Characters of the text that ends thoughts over their budget."""

MAX_TAGS = 8
"""Texts of `SamplingParams.thinking_tags`."""

MAX_MARKER_TOKENS = 4096
"""Token ids of all markers of a request together."""

DEFAULT_TAGS = ("<think>", "</think>")


class ThinkingTokens(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Token ids of the tags around the thoughts.

    Attributes:
        starts: Token sequences of which one opens the thoughts at the beginning of the output; empty if the output
            begins within the thoughts.
        ends: Token sequences of which each closes the thoughts.
        forced: The tokens that end the thoughts when their budget is spent, at least one.
        implicit_ends: Token sequences that end the thoughts without a closing tag, such as the beginning of a tool
            call.
    """

    starts: list[list[int]] = []
    ends: list[list[int]] = []
    forced: list[int] = []
    implicit_ends: list[list[int]] = []

    def sequences(self) -> Iterator[list[int]]:
        """All token sequences."""
        yield from self.starts
        yield from self.ends
        yield from self.implicit_ends
        yield self.forced


def check_thinking_tags(name: str, value: object) -> list[str] | None:
    """Checks a value of `SamplingParams.thinking_tags`.

    Raises:
        RequestError: It is not a list of two texts or more.
    """
    if value is None:
        return None
    expected = f"a list of 2 to {MAX_TAGS} texts of at most {MAX_TAG} characters (the third: {MAX_FORCED_TEXT}): "
    expected += "opening tag or '', closing tag, what to generate in its place, other ends of the thoughts"
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= MAX_TAGS:
        return reject(name, value, expected)
    for i, text in enumerate(value):
        limit = MAX_FORCED_TEXT if i == 2 else MAX_TAG
        if not isinstance(text, str) or not is_unicode(text) or len(text) > limit or (i and not text):
            return reject(name, text, expected)
    return [str(text) for text in value]


def as_thinking_tokens(name: str, value: object) -> ThinkingTokens | None:
    """Checks a value of `SamplingParams.thinking_tokens`: the struct, a dict of its fields, or None.

    Raises:
        RequestError: It is none of these.
    """
    if value is None:
        return None
    fields: dict[str, Any]
    if isinstance(value, ThinkingTokens):
        fields = {field: getattr(value, field) for field in ThinkingTokens.__struct_fields__}
    elif isinstance(value, dict) and set(value) <= set(ThinkingTokens.__struct_fields__):
        fields = value
    else:
        return reject(name, value, "ThinkingTokens, or a dict of its fields starts, ends, forced and implicit_ends")
    starts, ends, forced = fields.get("starts") or [], fields.get("ends") or [], fields.get("forced") or []
    implicit_ends = fields.get("implicit_ends") or []
    left = MAX_MARKER_TOKENS
    for markers in (starts, ends, [forced], implicit_ends):
        if not isinstance(markers, list | tuple):
            return reject(name, markers, "made of lists of token ids")
        for marker in markers:
            if not isinstance(marker, list | tuple) or not 0 < len(marker) <= left:
                return reject(name, marker, f"made of token ids, no list empty, {MAX_MARKER_TOKENS} in all at most")
            left -= len(marker)
    return ThinkingTokens(
        starts=[token_ids(name, marker) for marker in starts],
        ends=[token_ids(name, marker) for marker in ends],
        forced=token_ids(name, forced),
        implicit_ends=[token_ids(name, marker) for marker in implicit_ends],
    )
