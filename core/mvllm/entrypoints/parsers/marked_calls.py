"""Incremental parser of tool calls that follow a marker: the base of most tool call formats.

    text            I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>...
    reads as        content   opening       call                               after          opening

The parser is a state machine that consumes each character once; only the end of a piece that may be the beginning of a
marker is kept for the next piece. Text that turns out not to be a call becomes content; no delta of it has been emitted
by then. Content is the text without calls and markers. White space at its end is held back, and dropped as layout if
only calls follow.

Markers that are no part of a call:

    special tokens                                          dropped everywhere
    tags with nothing between them                          dropped
    tags before a call that is cut off, by the end of the
    text or by another call                                 dropped, with the call's text so far
    tags before a call that is cut off by another tag,
    which no call follows but content                       content, with the call's text so far
    closing tags after a call, or at the end of the text    dropped
    tags before text that is no call, other closing tags    content: the answer may be about them
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.entrypoints.parsers.interface import ContentDelta, Delta, ToolCallDelta, ToolStream, make_call_id
from mvllm.entrypoints.parsers.markers import (
    compile_markers,
    is_partial_marker,
    is_special,
    is_tag,
    partial_marker_length,
)
from mvllm.entrypoints.parsers.tool_call_reader import NOT_SPACE, CallReader, ToolCallReader

State = Callable[[str, int, list[Delta]], int]
"""A state: parses the text from an index, appends deltas, and returns the index of the first unread character."""


class MarkedCalls(ToolStream):
    """Incremental parser of calls that begin with a marker. Other formats override `opening`.

    Args:
        start: Marker before a call or a list of calls, or several of which any may stand there.
        end: Marker after it; None if there is none.
        separator: Text between calls outside of a list; empty if calls follow each other directly.
        closers: Further markers of the format that no call begins with.
        bare: Whether calls after the first may lack a marker.
        strict: As for ToolCallReader.
        make_id: Makes the calls' ids.
    """

    def __init__(
        self,
        start: str | tuple[str, ...],
        end: str | None = None,
        *,
        separator: str = "",
        closers: tuple[str, ...] = (),
        bare: bool = True,
        strict: bool = False,
        make_id: Callable[[], str] = make_call_id,
    ) -> None:
        self.num_calls = 0
        self.state: State = self.content
        self.last = ""  # the character before the current text
        self._starts = (start,) if isinstance(start, str) else start
        self._end = end
        self._closers = tuple(marker for marker in (end, *closers) if marker and is_tag(marker))
        self._markers = tuple(marker for marker in (*self._starts, *self._closers) if marker)
        self._pattern = compile_markers(self._markers)
        self._separator = separator
        self._bare = bare
        self._strict = strict
        self._make_id = make_id
        self._tail = ""  # the end of the last piece, if it may begin a marker
        self._space: list[str] = []  # white space that is content only if more content follows
        self._unfinished: list[int] = []  # indices in `_space` of calls that a marker cuts off; dropped before a call
        self._space_after_call: list[str] = []  # white space after a call: layout, if more of the format follows
        self._held: list[str] = []  # text that may be a call
        self._reader: CallReader | None = None
        self._in_list = False
        self._unclosed = False  # whether the end marker of a call is missing so far
        self._shown = False  # whether the last opening tag is content
        self._follows_call = False  # whether no content stands after the last call or the last empty markers

    def feed(self, text: str) -> list[Delta]:
        """Parses the next piece of text."""
        text = self._tail + text
        self._tail = ""
        out: list[Delta] = []
        i = 0
        while i < len(text):
            i = self.state(text, i, out)
        consumed = len(text) - len(self._tail)
        if consumed:
            self.last = text[consumed - 1]
        return merge_adjacent(out)

    def finish(self) -> list[Delta]:
        """Ends the text; returns the deltas that were held back."""
        out: list[Delta] = []
        if self._reader is not None and self._reader.started:
            if not self.is_cut:
                self._reader.finish(out, self._tail)
            self._reader, self._tail = None, ""
        if self._held and (is_tag(self._held[0]) or self._follows_call) and self.may_be_call():
            self._held, self._tail = [], ""
        if self._follows_call and any(is_partial_marker(self._tail, 0, marker) for marker in self._all_markers):
            self._tail = ""
        self.say(self._shown_text() + self._tail, out)
        self._held, self._tail = [], ""
        if not self.num_calls and (space := "".join(text for text in self._space if not text.strip())):
            out.append(ContentDelta(space))
        self._space = []
        return merge_adjacent(out)

    # The states. Each consumes text, changes the state, or keeps text for the next piece.

    def content(self, text: str, i: int, out: list[Delta]) -> int:
        """State outside of calls."""
        found = self._pattern.search(text, i)
        if found is None:
            end = len(text) - partial_marker_length(text, i, self._markers)
            self.say(text[i:end], out)
            return self.wait(text, end)
        self.say(text[i : found.start()], out)
        marker = found.group()
        if marker in self._starts:
            self.open(marker)
        else:
            self.drop_closer(marker, out)
        return found.end()

    def opening(self, text: str, i: int, out: list[Delta]) -> int:
        """State after a marker, a bracket or a separator: an object or a list of objects should follow."""
        found = NOT_SPACE.search(text, i)
        if found is None:
            return self.hold(text, i, len(text))
        self.hold(text, i, found.start())
        c = found.group()
        if (end := self.skip_empty(text, found.start())) is not None:
            return end
        if c == "[" and not self._in_list:
            self._in_list = True
            return self.hold(text, found.start(), found.end())
        if c != "{":
            return self.give_up(found.start(), out)
        self.read_call()
        return found.start()

    def call(self, text: str, i: int, out: list[Delta]) -> int:
        """State inside a call."""
        reader = self._reader
        assert reader is not None
        end = reader.feed(text, i, out)
        if not reader.started:
            self.hold(text, i, end)
            if reader.failed:
                self.state = self.no_call
                return end
            return self.wait(text, end)
        if reader.index == self.num_calls:
            self.num_calls += 1
            self._held = []
            for at in self._unfinished:
                self._space[at] = ""
            self._unfinished = []
            self._unclosed = self._follows_call = True
        if reader.done or reader.failed:
            self._reader = None
            self.state = self.after if reader.done else self.content
            self._in_list &= reader.done
            return end
        return self.wait(text, end)

    def no_call(self, text: str, i: int, out: list[Delta]) -> int:
        """State after text that is not a call: it is content, except before another call."""
        if self._held and is_tag(self._held[0]) and any(is_partial_marker(text, i, marker) for marker in self._openers):
            return self.wait(text, i)
        end = self.drop_unfinished(text, i)
        return self.give_up(i, out) if end is None else end

    def after(self, text: str, i: int, out: list[Delta]) -> int:
        """State after a call: another call, the end of the list, the end marker, or content follows."""
        found = NOT_SPACE.search(text, i)
        if found is None:
            self._space_after_call.append(text[i:])
            return len(text)
        self._space_after_call.append(text[i : found.start()])
        i, c = found.start(), found.group()
        if self._end is not None and is_partial_marker(text, i, self._end):
            return self.wait(text, i)
        space, self._space_after_call = "".join(self._space_after_call), []
        if self._in_list and c == "]":
            self._in_list = False
            return i + 1
        if c == ("," if self._in_list else self._separator):
            self.open(space + c)
            return i + 1
        if self._bare and c == "{" and not self._in_list:
            self.open(space)
            return i
        self._in_list = False
        self.state = self.content
        if self._end is not None and text.startswith(self._end, i):
            self._unclosed = False
            return i + len(self._end)
        self._space.append(space)
        return i

    # Operations of the states.

    def say(self, text: str, out: list[Delta]) -> None:
        """Emits content without the white space at its end, which is held back."""
        stripped = text.rstrip()
        if stripped:
            out.append(ContentDelta("".join(self._space) + stripped))
            self._space, self._unfinished = [], []
            self._follows_call = False
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])

    def wait(self, text: str, i: int) -> int:
        """Keeps the text from `i` for the next piece; it must be shorter than a marker. Returns the end of the text."""
        self._tail = text[i:]
        return len(text)

    def hold(self, text: str, i: int, end: int) -> int:
        """Stores text that may be part of a call, to emit it as content otherwise; returns `end`."""
        if end > i:
            self._held.append(text[i:end])
        return end

    def open(self, marker: str) -> None:
        """Enters the state `opening` after `marker`."""
        self._held = [marker]
        self.state = self.opening

    def read_call(self) -> None:
        """Enters the state `call` for an object with the name and the arguments."""
        self.read_with(ToolCallReader(self.num_calls, strict=self._strict, make_id=self._make_id))

    def read_arguments(self, name: str) -> None:
        """Enters the state `call` for the arguments of the function `name`."""
        self.read_with(ToolCallReader(self.num_calls, name, make_id=self._make_id))

    def read_with(self, reader: CallReader) -> None:
        """Enters the state `call` with a reader."""
        self._reader = reader
        self.state = self.call

    def drop_closer(self, marker: str, out: list[Delta]) -> None:
        """Drops a closing marker outside of calls, or holds it back like white space if it may be content."""
        if self._shown and not is_special(marker):
            self.say(marker, out)
        elif not (self._unclosed or self._follows_call or is_special(marker)):
            self._space.append(marker)
        self._unclosed = self._shown = False

    def skip_empty(self, text: str, i: int) -> int | None:
        """Drops the stored markers if nothing stands between them and the marker at `i`.

        Returns the index of the first unread character; None if there is something.
        """
        if not self._held or not is_tag(self._held[0]):
            return None
        inner = "".join(self._held[1:]).strip()
        if inner == "[" and self._in_list and text[i] == "]":
            end = i + 1
        elif inner and inner != "[" and not all(text in self._markers or not text.strip() for text in self._held):
            return None
        elif (found := self._pattern.match(text, i)) is not None:
            end = i if found.group() in self._openers else found.end()
            if inner == "[":
                self._hold_back()
        elif any(is_partial_marker(text, i, marker) for marker in self._markers):
            return self.wait(text, i)
        else:
            return None
        self._held, self._in_list = [], False
        self._follows_call = True
        self.state = self.content
        return end

    def drop_unfinished(self, text: str, i: int) -> int | None:
        """Holds the stored text back like white space if it is the beginning of a call before another marker.

        It is dropped if a call follows. Returns `i`; None if the text is no beginning of a call.
        """
        found = self._pattern.match(text, i)
        if not (found and found.group() in self._openers and self._held and is_tag(self._held[0])):
            return None
        if not self.may_be_call():
            return None
        self._hold_back()
        self._held, self._in_list, self._reader = [], False, None
        self._follows_call = True
        self.state = self.content
        return i

    def _hold_back(self) -> None:
        """Makes the stored text content, if more content follows before a call."""
        self._unfinished.append(len(self._space))
        self._space.append(self._shown_text())

    @property
    def _all_markers(self) -> tuple[str, ...]:
        return self._markers

    def may_be_call(self) -> bool:
        """Whether the stored text is the beginning of a call, which is dropped at the end of the text."""
        return True

    def _shown_text(self) -> str:
        """The stored text without special tokens."""
        return self._pattern.sub(lambda found: "" if is_special(found.group()) else found.group(), "".join(self._held))

    @property
    def _openers(self) -> tuple[str, ...]:
        return self._starts

    def give_up(self, i: int, out: list[Delta]) -> int:
        """Emits the stored text as content; parsing continues at `i`."""
        self._reader = None
        self._in_list = False
        self._shown = any(not is_special(marker) for marker in self._pattern.findall("".join(self._held)))
        self.say(self._shown_text(), out)
        self._held = []
        self.state = self.content
        return i


def merge_adjacent(deltas: list[Delta]) -> list[Delta]:
    """The deltas with adjacent ones of one kind joined."""
    if len(deltas) < 2:
        return deltas
    merged: list[Delta] = []
    run: list[Delta] = []
    for delta in deltas:
        if run and not _continues(run[-1], delta):
            merged.append(_joined(run))
            run = []
        run.append(delta)
    merged.append(_joined(run))
    return merged


def _continues(before: Delta, delta: Delta) -> bool:
    if isinstance(delta, ToolCallDelta):
        return isinstance(before, ToolCallDelta) and before.id is None and delta.id is None
    return isinstance(before, ContentDelta)


def _joined(run: list[Delta]) -> Delta:
    first = run[0]
    if len(run) == 1:
        return first
    if isinstance(first, ToolCallDelta):
        return ToolCallDelta(first.index, arguments="".join(d.arguments for d in run if isinstance(d, ToolCallDelta)))
    return ContentDelta("".join(d.text for d in run if isinstance(d, ContentDelta)))
