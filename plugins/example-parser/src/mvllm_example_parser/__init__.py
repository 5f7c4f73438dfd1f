"""Example tool-call parser and reasoning parser.

function_tag    <function=get_weather>{"city": "Paris"}</function>      calls, as some models are prompted to write them
thought_tag     <thought>It is in France.</thought>                     thoughts before the answer
"""

from __future__ import annotations

import re

from mvllm.extension_api import (
    Delta,
    MarkedCalls,
    ReasoningParser,
    ReasoningStream,
    TaggedReasoning,
    ToolParser,
    ToolStream,
)

_BEHIND_NAME = re.compile(r"[^\w.\-]")


class FunctionTagParser(ToolParser):
    """Parser of calls with the function's name in the tag and only the arguments between the tags."""

    markers = ("<function=", "</function>")

    def stream(self) -> ToolStream:
        return _FunctionTags()


class _FunctionTags(MarkedCalls):
    def __init__(self) -> None:
        super().__init__("<function=", "</function>", bare=False)
        self._name: list[str] = []

    def open(self, marker: str) -> None:
        super().open(marker)
        self._name = []

    def opening(self, text: str, i: int, out: list[Delta]) -> int:
        """Reads the name, possibly in pieces, and holds it back until its tag is closed: it may not be a call."""
        behind = _BEHIND_NAME.search(text, i)
        end = behind.start() if behind else len(text)
        self._name.append(text[i:end])
        self.hold(text, i, end)
        if behind is None:
            return end
        name = "".join(self._name)
        if behind.group() != ">" or not name:
            return self.give_up(end, out)
        self.read_arguments(name)
        return self.hold(text, end, end + 1)


class ThoughtTagParser(ReasoningParser):
    """Parser of reasoning whose opening tag the model or its template writes."""

    markers = ("<thought>", "</thought>")

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        start, end = self.markers
        return TaggedReasoning(start, end, opened=(prompt or "").rstrip().endswith(start))
