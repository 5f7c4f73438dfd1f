"""Parser of reasoning between two tags at the beginning of an output: the base of most reasoning formats.

White space next to the tags is layout and dropped. Only the first pair of tags delimits reasoning; all later text is
content.
"""

from __future__ import annotations

from typing import ClassVar

from mvllm.entrypoints.parsers.interface import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReasoningParser,
    ReasoningStream,
)
from mvllm.entrypoints.parsers.markers import is_partial_marker, partial_marker_length
from mvllm.entrypoints.parsers.tool_call_reader import NOT_SPACE

_BEFORE, _REASONING, _AFTER, _CONTENT = range(4)


class TaggedReasoning(ReasoningStream):
    """Incremental parser of reasoning up to its closing tag.

    Args:
        start: The opening tag; optional in the text if `opened`.
        end: The closing tag.
        opened: Whether the text begins inside the reasoning.
        closed: Whether the prompt has closed the reasoning, so that all text is content.
    """

    def __init__(self, start: str, end: str, *, opened: bool, closed: bool = False) -> None:
        self._start = start
        self._end = end
        self._opened = opened
        self._state = _CONTENT if closed else _BEFORE
        self._tail = ""  # the end of the last piece, if it may begin a tag
        self._space: list[str] = []  # white space that is layout, or belongs to the following text
        self._has_emitted = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state == _REASONING or (self._state == _BEFORE and self._opened)

    def feed(self, text: str) -> list[Delta]:
        """Parses the next piece of text."""
        if self._state == _CONTENT:
            return [ContentDelta(text)] if text else []
        text = self._tail + text
        self._tail = ""
        out: list[Delta] = []
        i = 0
        if self._state == _BEFORE:
            i = self._look_for_start(text)
        if self._state == _REASONING:
            i = self._read_reasoning(text, i, out)
        if self._state == _AFTER:
            i = self._skip_space(text, i)
        if self._state == _CONTENT and (content := "".join(self._space) + text[i:]):
            self._space = []
            out.append(ContentDelta(content))
        return out

    def finish(self) -> list[Delta]:
        """Ends the text; returns the deltas that were held back."""
        text = "".join(self._space) + self._tail
        self._space, self._tail = [], ""
        if not text or self._state == _AFTER:
            return []
        return [ReasoningDelta(text)] if self.in_reasoning else [ContentDelta(text)]

    def _look_for_start(self, text: str) -> int:
        found = NOT_SPACE.search(text)
        if found is None:
            self._space.append(text)
            return len(text)
        i = found.start()
        if is_partial_marker(text, i, self._start) or (self._opened and is_partial_marker(text, i, self._end)):
            self._space.append(text[:i])
            self._tail = text[i:]
            return len(text)
        if text.startswith(self._start, i):
            self._state = _REASONING
            self._space = []
            return i + len(self._start)
        if self._opened:
            self._state = _REASONING
            self._space = []
            return i
        self._state = _CONTENT
        return 0

    def _read_reasoning(self, text: str, i: int, out: list[Delta]) -> int:
        at = text.find(self._end, i)
        end = at if at >= 0 else len(text) - partial_marker_length(text, i, (self._end,))
        self._emit(text[i:end], out)
        if at < 0:
            self._tail = text[end:]
            return len(text)
        self._space = []
        self._state = _AFTER
        return at + len(self._end)

    def _skip_space(self, text: str, i: int) -> int:
        found = NOT_SPACE.search(text, i)
        if found is None:
            return len(text)
        self._state = _CONTENT
        return found.start()

    def _emit(self, text: str, out: list[Delta]) -> None:
        """Emits reasoning without the white space at its beginning and end."""
        if not self._has_emitted:
            text = text.lstrip()
        stripped = text.rstrip()
        if stripped:
            out.append(ReasoningDelta("".join(self._space) + stripped))
            self._space = []
            self._has_emitted = True
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])


class ThinkTagParser(ReasoningParser):
    """Parser of reasoning between `<think>` and `</think>`."""

    tags = ("<think>", "</think>")
    markers = tags

    always_reasons: ClassVar[bool] = False
    """Whether every output starts inside the reasoning, with or without the opening tag."""

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        start, end = self.tags
        opened = self.always_reasons or ends_with_tag(prompt, start)
        return TaggedReasoning(start, end, opened=opened, closed=ends_with_tag(prompt, end))


def ends_with_tag(prompt: str | None, tag: str) -> bool:
    """Whether a prompt ends with `tag`, white space ignored."""
    return prompt is not None and prompt[-256:].rstrip().endswith(tag)
