"""Placeholders that users type in a conversation stay text.

A chat template writes a placeholder for each image, and users may write the same characters: `Is <image> a token?`.
Only those of the template stand for images. So the others are cut before rendering, by a text that nobody can guess,
and each piece of the rendered prompt is tokenized alone:

    message      What does <image> mean?
    rendered     USER: <image> What does <|CUT|image> mean? ASSISTANT:
    tokenized    "USER: <image> What does <"   "image> mean? ASSISTANT:"
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

_BEGIN, _END = "\ue000", "\uf8ff"
"""Characters of no script around the random part."""


class TypedPlaceholders:
    """Cuts placeholders in the texts of one conversation.

    Args:
        placeholders: What stands for an item in a prompt, and the tokens that take embeddings.

    Attributes:
        cut_at: What is written into them; None as long as there were none.
    """

    def __init__(self, placeholders: Iterable[str]) -> None:
        found = sorted({each for each in placeholders if len(each) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found))) if found else None
        self._cut = f"{_BEGIN}{secrets.token_hex(8)}{_END}"
        self.cut_at: str | None = None

    def cut(self, value: Any) -> Any:
        """A text, or a structure of JSON with texts, in which they are cut. What has none is returned as it is."""
        if isinstance(value, str):
            return self._cut_text(value)
        if isinstance(value, Mapping):
            return {key: self.cut(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.cut(each) for each in value]
        return value

    def _cut_text(self, text: str) -> str:
        if self._pattern is None or self._pattern.search(text) is None:
            return text
        self.cut_at = self._cut
        return self._pattern.sub(lambda match: f"{match.group()[0]}{self._cut}{match.group()[1:]}", text)
