"""Parser of reasoning before a content that has tags of its own, which are dropped.

    <think>I add.</think><response>4</response>

Tags in other places are content.
"""

from __future__ import annotations

from typing import ClassVar

from mvllm.entrypoints.parsers.interface import ContentDelta, Delta, ReasoningStream
from mvllm.entrypoints.parsers.markers import is_partial_marker, partial_marker_length
from mvllm.entrypoints.parsers.reasoning.tagged import TaggedReasoningParser
from mvllm.entrypoints.parsers.tool_call_reader import NOT_SPACE

_BEFORE, _LAYOUT, _WRAPPED, _BEHIND, _PLAIN = range(5)


class WrappedContent(ReasoningStream):
    """Removes the tags around the content of another stream.

    Args:
        inner: Separates the reasoning.
        start, end: The tags of the content; it may lack them.
    """

    def __init__(self, inner: ReasoningStream, start: str, end: str) -> None:
        self._inner = inner
        self._start = start
        self._end = end
        self._state = _BEFORE
        self._held = ""  # text that may belong to a tag, with the white space before it

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._inner.in_reasoning

    def feed(self, text: str) -> list[Delta]:
        """Parses the next piece of text."""
        return self._unwrap(self._inner.feed(text))

    def finish(self) -> list[Delta]:
        """Ends the text; returns the deltas that were held back."""
        out = self._unwrap(self._inner.finish())
        if self._held and self._state != _BEHIND:
            out.append(ContentDelta(self._held))
        self._held = ""
        return out

    def _unwrap(self, deltas: list[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, ContentDelta):
                out.append(delta)
            elif text := self._read(self._held + delta.text):
                out.append(ContentDelta(text))
        return out

    def _read(self, text: str) -> str:
        """The content in the next text; the end of the text may be held back."""
        self._held = ""
        if self._state == _BEFORE:
            found = NOT_SPACE.search(text)
            if found is None or is_partial_marker(text, found.start(), self._start):
                self._held = text
                return ""
            is_wrapped = text.startswith(self._start, found.start())
            self._state = _LAYOUT if is_wrapped else _PLAIN
            text = text[found.start() + len(self._start) :] if is_wrapped else text
        if self._state == _LAYOUT:
            text = text.lstrip()
            if not text:
                return ""
            self._state = _WRAPPED
        if self._state == _WRAPPED:
            content, end, text = text.partition(self._end)
            if end:
                self._state = _BEHIND
                return content.rstrip() + self._read(text)
            keep = len(content) - partial_marker_length(content, 0, (self._end,))
            keep = len(content[:keep].rstrip())
            self._held = content[keep:]
            return content[:keep]
        if self._state == _BEHIND:
            if not text.strip():
                self._held = text
                return ""
            self._state = _PLAIN
        return text


class WrappedContentParser(TaggedReasoningParser):
    """Parser of tagged reasoning before content between the texts of `content_tags`."""

    content_tags: ClassVar[tuple[str, str]]

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        return WrappedContent(super().stream(prompt), *self.content_tags)
