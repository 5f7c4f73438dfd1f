"""Thoughts between two tags at the beginning of an answer: what most formats are.

White space around the thoughts, inside the tags and behind them, is layout and given out as nothing. Only the first
pair of tags counts; whatever comes later is the answer.
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

_BEFORE, _WITHIN, _BEHIND, _ANSWER = range(4)


class TaggedReasoning(ReasoningStream):
    """Reads thoughts up to their closing tag.

    Args:
        start: The tag that opens them. It may be missing where `opened`.
        end: The tag that closes them.
        opened: Whether the text begins within the thoughts, until it closes them or ends.
        closed: Whether the prompt has closed them already, so that all is the answer.
    """

    def __init__(self, start: str, end: str, *, opened: bool, closed: bool = False) -> None:
        self._start = start
        self._end = end
        self._opened = opened
        self._state = _ANSWER if closed else _BEFORE
        self._tail = ""  # the end of the last piece, where it may be the beginning of a tag
        self._space: list[str] = []  # white space that is layout, or belongs to what follows
        self._has_emitted = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within the thoughts."""
        return self._state == _WITHIN or (self._state == _BEFORE and self._opened)

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of text."""
        if self._state == _ANSWER:
            return [ContentDelta(text)] if text else []
        text = self._tail + text
        self._tail = ""
        out: list[Delta] = []
        i = 0
        if self._state == _BEFORE:
            i = self._look_for_start(text)
        if self._state == _WITHIN:
            i = self._read_thoughts(text, i, out)
        if self._state == _BEHIND:
            i = self._skip_space(text, i)
        if self._state == _ANSWER and (answer := "".join(self._space) + text[i:]):
            self._space = []
            out.append(ContentDelta(answer))
        return out

    def finish(self) -> list[Delta]:
        """Gives what was held back."""
        text = "".join(self._space) + self._tail
        self._space, self._tail = [], ""
        if not text or self._state == _BEHIND:
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
            self._state = _WITHIN
            self._space = []
            return i + len(self._start)
        if self._opened:
            self._state = _WITHIN
            self._space = []
            return i
        self._state = _ANSWER
        return 0

    def _read_thoughts(self, text: str, i: int, out: list[Delta]) -> int:
        at = text.find(self._end, i)
        end = at if at >= 0 else len(text) - partial_marker_length(text, i, (self._end,))
        self._emit(text[i:end], out)
        if at < 0:
            self._tail = text[end:]
            return len(text)
        self._space = []
        self._state = _BEHIND
        return at + len(self._end)

    def _skip_space(self, text: str, i: int) -> int:
        found = NOT_SPACE.search(text, i)
        if found is None:
            return len(text)
        self._state = _ANSWER
        return found.start()

    def _emit(self, text: str, out: list[Delta]) -> None:
        """Gives out thoughts, but for white space at their end, and at their beginning."""
        if not self._has_emitted:
            text = text.lstrip()
        said = text.rstrip()
        if said:
            out.append(ReasoningDelta("".join(self._space) + said))
            self._space = []
            self._has_emitted = True
        if len(said) < len(text):
            self._space.append(text[len(said) :])


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
    """Whether `tag` is the last of a prompt, but for white space."""
    return prompt is not None and prompt[-256:].rstrip().endswith(tag)
