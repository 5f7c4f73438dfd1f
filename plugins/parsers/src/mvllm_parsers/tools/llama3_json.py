"""Tool call format of Llama 3.1 and 3.2: JSON objects, optionally after a marker, separated by `;`.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}
    <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}

Without a marker an object may also be content. It is a call only if it begins the text or a line, has `name` and
`parameters` (or `arguments`), and no other key before them except `type` and `id`.
"""

from __future__ import annotations

import re

from mvllm.extension_api.parsers import CallSyntax, Delta, MarkedCalls, ToolParser, ToolStream

MARKER = "<|python_tag|>"

_NEXT = re.compile(rf"{re.escape(MARKER)}|\n(?=\{{)")
_SPACES = re.compile(r"\s+")


class Llama3JsonToolParser(ToolParser):
    """`{"name": ..., "parameters": {...}}`."""

    markers = (MARKER,)

    def stream(self) -> ToolStream:
        return _Stream()

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return (CallSyntax('{"name":', f'{{"name": "{name}", "parameters": ', "}", special_tokens=self.markers),)


class _Stream(MarkedCalls):
    def __init__(self) -> None:
        super().__init__(MARKER, separator=";", strict=True)
        self._pattern = _NEXT
        self._at_start = True  # only white space so far

    def content(self, text: str, i: int, out: list[Delta]) -> int:
        if self._at_start:
            spaces = _SPACES.match(text, i)
            if spaces is not None:
                self.say(spaces.group(), out)
                return spaces.end()
            self._at_start = False
            if text[i] in "{[":
                self.open("")
                return i
        if text[i] == "{" and (text[i - 1] if i else self.last) == "\n":
            self.open("")
            return i
        if (found := _NEXT.search(text, i)) is not None and found.group() == "\n":
            self.say(text[i : found.end()], out)
            return found.end()
        return super().content(text, i, out)
