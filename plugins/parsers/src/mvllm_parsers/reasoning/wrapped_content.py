"""Parser of reasoning before a content that has tags of its own, which are dropped.

    <think>I add.</think><response>4</response>

Tags in other places are content.
"""

from __future__ import annotations

from typing import ClassVar

from mvllm.extension_api.parsers import (
    NOT_SPACE,
    ContentDelta,
    Delta,
    ReasoningStream,
    TaggedReasoningParser,
    is_partial_marker,
    partial_marker_length,
)

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
        self._space: list[str] = []  # white space that is layout, or belongs to the following content
        self._tail = ""  # text that may belong to a tag

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
        rest = "".join(self._space) + self._tail
        if rest and self._state != _BEHIND:
            out.append(ContentDelta(rest))
        self._space, self._tail = [], ""
        return out

    def _unwrap(self, deltas: list[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, ContentDelta):
                out.append(delta)
            elif text := self._read(self._tail + delta.text):
                out.append(ContentDelta(text))
        return out

    def _read(self, text: str) -> str:
        """The content in the next text; the end of the text may be held back."""
        self._tail = ""
        if self._state == _BEFORE:
            found = NOT_SPACE.search(text)
            if found is None:
                return self._hold(text)
            self._space.append(text[: found.start()])
            text = text[found.start() :]
            if is_partial_marker(text, 0, self._start):
                self._tail = text
                return ""
            if not text.startswith(self._start):
                self._state = _PLAIN
                return self._take_space() + text
            self._state, self._space = _LAYOUT, []
            text = text[len(self._start) :]
        if self._state == _LAYOUT:
            text = text.lstrip()
            if not text:
                return ""
            self._state = _WRAPPED
        if self._state == _WRAPPED:
            content, end, rest = text.partition(self._end)
            if not end:
                keep = len(content) - partial_marker_length(content, 0, (self._end,))
                content, self._tail = content[:keep], content[keep:]
            stripped = content.rstrip()
            emitted = self._take_space() + stripped if stripped else ""
            if not end:
                self._hold(content[len(stripped) :])
                return emitted
            self._state, self._space = _BEHIND, []
            return emitted + self._read(rest)
        if self._state == _BEHIND:
            if not text.strip():
                return self._hold(text)
            self._state = _PLAIN
        return self._take_space() + text

    def _hold(self, space: str) -> str:
        """Holds back white space. Returns no content."""
        if space:
            self._space.append(space)
        return ""

    def _take_space(self) -> str:
        space, self._space = "".join(self._space), []
        return space


class WrappedContentParser(TaggedReasoningParser):
    """Parser of tagged reasoning before content between the texts of `content_tags`."""

    content_tags: ClassVar[tuple[str, str]]

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        return WrappedContent(super().stream(prompt), *self.content_tags)
