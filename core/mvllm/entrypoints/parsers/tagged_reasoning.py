"""Parser of reasoning between two tags at the beginning of an output: the base of most reasoning formats.

White space next to the tags is layout and dropped. Only the first pair of tags delimits reasoning; all later text is
content.

    prompt ends with the opening tag    the output begins inside the reasoning; it may repeat the tag
    prompt ends with the closing tag    reasoning is switched off: the output is content
    prompt ends within a message        the last tag in the message or before it decides; without one, the message is
                                        content and has no reasoning any more
    otherwise                           the output has reasoning if it begins with the opening tag; models that always
                                        reason may leave the tag out
    the closing tag is missing          everything after the opening tag is reasoning
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
from mvllm.entrypoints.parsers.markers import compile_markers, is_partial_marker, partial_marker_length
from mvllm.entrypoints.parsers.tool_call_reader import NOT_SPACE

_BEFORE, _REASONING, _AFTER, _CONTENT = range(4)


class TaggedReasoning(ReasoningStream):
    """Incremental parser of reasoning up to its closing tag.

    Args:
        start: The opening tag, or several variants; optional in the text if `opened`.
        end: The closing tag, or several variants.
        opened: Whether the text begins inside the reasoning.
        closed: Whether the prompt has closed the reasoning, so that all text is content.
        at_tag: Whether a closed prompt ends with the tag itself, so that white space is still layout.
        implicit_ends: Texts that close the reasoning and belong to the content, for instance the beginning of a tool
            call.
    """

    def __init__(
        self,
        start: str | tuple[str, ...],
        end: str | tuple[str, ...],
        *,
        opened: bool,
        closed: bool = False,
        at_tag: bool = False,
        implicit_ends: tuple[str, ...] = (),
    ) -> None:
        starts = (start,) if isinstance(start, str) else start
        self._starts = sorted(starts, key=len, reverse=True)
        self._ends = frozenset((end,) if isinstance(end, str) else end)
        self._closers = (*self._ends, *implicit_ends)
        self._before = (*self._starts, *self._closers) if opened else tuple(self._starts)
        self._pattern = compile_markers(self._closers)
        self._opened = opened
        self._state = (_AFTER if at_tag else _CONTENT) if closed else _BEFORE
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
        space, tail = "".join(self._space), self._tail
        self._space, self._tail = [], ""
        if self._state == _AFTER:
            return []
        if self._state == _BEFORE and (start := self._start_at(tail, 0)):  # it might have been a longer one
            self._state = _REASONING
            space, tail = "", tail[len(start) :]
        text = space + tail
        if not text:
            return []
        return [ReasoningDelta(text)] if self.in_reasoning else [ContentDelta(text)]

    def _look_for_start(self, text: str) -> int:
        found = NOT_SPACE.search(text)
        if found is None:
            self._space.append(text)
            return len(text)
        i = found.start()
        if any(is_partial_marker(text, i, marker) for marker in self._before):
            self._space.append(text[:i])
            self._tail = text[i:]
            return len(text)
        start = self._start_at(text, i)
        if start or self._opened:
            self._state = _REASONING
            self._space = []
            return i + len(start)
        self._state = _CONTENT
        return 0

    def _start_at(self, text: str, i: int) -> str:
        """The opening tag at `i`; empty if there is none."""
        return next((start for start in self._starts if text.startswith(start, i)), "")

    def _read_reasoning(self, text: str, i: int, out: list[Delta]) -> int:
        found = self._pattern.search(text, i)
        end = found.start() if found else len(text) - partial_marker_length(text, i, self._closers)
        self._emit(text[i:end], out)
        if found is None:
            self._tail = text[end:]
            return len(text)
        self._space = []
        self._state = _AFTER
        return found.end() if found.group() in self._ends else end

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


class TaggedReasoningParser(ReasoningParser):
    """Parser of reasoning between the texts of `tags`."""

    tags: ClassVar[tuple[str, str]]

    more_tags: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Further spellings of the tags."""

    always_reasons: ClassVar[bool] = False
    """Whether every output starts inside the reasoning, with or without the opening tag."""

    @classmethod
    def budget_tags(cls) -> list[str] | None:
        """See ReasoningParser. With `always_reasons` the output begins within the thoughts; an opening tag counts."""
        tags = super().budget_tags()
        return ["", *tags[1:]] if tags is not None and cls.always_reasons else tags

    def continued_prompt(self, prompt: str, message: str) -> str:
        starts, ends = zip(self.tags, *self.more_tags, strict=True)
        message = message.strip()
        if not message:
            return prompt
        last_start, last_end = (max(message.rfind(tag.rstrip()) for tag in tags) for tags in (starts, ends))
        before = prompt.rstrip().removesuffix(message)
        if last_start < 0 and last_end < 0 and any(ends_with_tag(before, start) for start in starts):
            return before
        # The line break: white space after it is that of the content.
        return self.tags[0] if last_start > last_end else f"{self.tags[1]}\n"

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        starts, ends = zip(self.tags, *self.more_tags, strict=True)
        return TaggedReasoning(
            starts,
            ends,
            opened=self.always_reasons or any(ends_with_tag(prompt, start) for start in starts),
            closed=any(ends_with_tag(prompt, end) for end in ends),
            at_tag=prompt is not None and prompt.endswith(ends),
            implicit_ends=self.implicit_ends,
        )


class ThinkTagParser(TaggedReasoningParser):
    """Parser of reasoning between `<think>` and `</think>`."""

    tags = ("<think>", "</think>")
    markers: ClassVar[tuple[str, ...]] = tags


class DeepSeekR1ReasoningParser(ThinkTagParser):
    """`<think>...</think>` of models that always reason, with an optional opening tag.

    Chat templates of DeepSeek-R1 and its distilled models open the reasoning at the end of the prompt. The whole output
    is reasoning until the closing tag, except where the prompt already contains it.
    """

    always_reasons = True


class Qwen3ReasoningParser(ThinkTagParser):
    """`<think>...</think>`, or no reasoning at all.

    Reasoning starts where the output starts with the opening tag, or where the prompt ends with it. With
    `enable_thinking` false the chat template writes an empty pair of tags, and the whole output is content. Qwen3.5 may
    call a tool without closing its reasoning.
    """

    implicit_ends = ("<tool_call>\n<function=", "<tool_call><function=")


def ends_with_tag(prompt: str | None, tag: str) -> bool:
    """Whether a prompt ends with `tag`, white space ignored."""
    return prompt is not None and prompt[-256:].rstrip().endswith(tag.rstrip())
