"""Calls behind a marker, with content around them: what most formats are, and what readers of others build on.

    text            I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>...
    reads as        content   opening       call                               after          opening

Whatever comes is consumed once, by the state that the reader is in, except for the end of a piece that may be the
beginning of a marker. A call that turns out not to be one, which is before anything of it was given out, is content as
far as it was read. Content is the text without the calls and their markers; white space at its end is held back, and is
the calls' layout where a call and nothing else follows.
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.entrypoints.parsers.interface import ContentDelta, Delta, ToolCallDelta, ToolStream, make_call_id
from mvllm.entrypoints.parsers.markers import compile_markers, is_partial_marker, partial_marker_length
from mvllm.entrypoints.parsers.tool_call_reader import NOT_SPACE, ToolCallReader

State = Callable[[str, int, list[Delta]], int]
"""Reads on from an index of the text, appends what is certain, and returns where it stopped."""


class MarkedCalls(ToolStream):
    """Finds calls that begin with a marker. A format of another look overrides `opening`.

    Args:
        start: What stands before a call or a list of calls.
        end: What stands after it; None where nothing does.
        separator: What may stand between calls outside of a list. Empty where they follow each other directly.
        bare: Whether further calls may follow the first without a marker of their own.
        strict: As for ToolCallReader.
        make_id: Makes the calls' ids.
    """

    def __init__(
        self,
        start: str,
        end: str | None = None,
        *,
        separator: str = "",
        bare: bool = True,
        strict: bool = False,
        make_id: Callable[[], str] = make_call_id,
    ) -> None:
        self.num_calls = 0
        self.state: State = self.content
        self.last = ""  # the character before the text that is read
        self._start = start
        self._end = end
        self._markers = tuple(marker for marker in (start, end) if marker)
        self._pattern = compile_markers(self._markers)
        self._separator = separator
        self._bare = bare
        self._strict = strict
        self._make_id = make_id
        self._tail = ""  # the end of the last piece, where it may be the beginning of a marker
        self._space: list[str] = []  # white space that is content only if more content follows
        self._space_after_call: list[str] = []  # white space behind a call: layout, if more of the format follows
        self._held: list[str] = []  # what may be a call, as it was written
        self._reader: ToolCallReader | None = None
        self._in_list = False
        self._unclosed = False  # whether the end marker of a call has not come yet

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of text."""
        text = self._tail + text
        self._tail = ""
        out: list[Delta] = []
        i = 0
        while i < len(text):
            i = self.state(text, i, out)
        consumed = len(text) - len(self._tail)
        if consumed:
            self.last = text[consumed - 1]
        return _merged(out)

    def finish(self) -> list[Delta]:
        """Gives what was held back."""
        out: list[Delta] = []
        if self._reader is not None and self._reader.started:
            self._reader.finish(out)
            self._reader = None
        self.say("".join(self._held) + self._tail, out)
        self._held, self._tail = [], ""
        if not self.num_calls and self._space:
            out.append(ContentDelta("".join(self._space)))
        self._space = []
        return _merged(out)

    # The states. Each consumes something, changes the state, or waits for more text.

    def content(self, text: str, i: int, out: list[Delta]) -> int:
        """Outside of calls."""
        found = self._pattern.search(text, i)
        if found is None:
            end = len(text) - partial_marker_length(text, i, self._markers)
            self.say(text[i:end], out)
            return self.wait(text, end)
        self.say(text[i : found.start()], out)
        marker = found.group()
        if marker == self._start:
            self.open(marker)
        elif self._unclosed:
            self._unclosed = False
        else:
            self.say(marker, out)
        return found.end()

    def opening(self, text: str, i: int, out: list[Delta]) -> int:
        """Behind a marker, a bracket or a separator: an object should follow, or a list of them."""
        found = NOT_SPACE.search(text, i)
        if found is None:
            return self.hold(text, i, len(text))
        self.hold(text, i, found.start())
        c = found.group()
        if c == "[" and not self._in_list:
            self._in_list = True
            return self.hold(text, found.start(), found.end())
        if c != "{":
            return self.give_up(found.start(), out)
        self.read_call()
        return found.start()

    def call(self, text: str, i: int, out: list[Delta]) -> int:
        """Within a call."""
        reader = self._reader
        assert reader is not None
        end = reader.feed(text, i, out)
        if not reader.started:
            self.hold(text, i, end)
            return self.give_up(end, out) if reader.failed else end
        if reader.index == self.num_calls:
            self.num_calls += 1
            self._held = []
            self._unclosed = True
        if reader.done or reader.failed:
            self._reader = None
            self.state = self.after if reader.done else self.content
            self._in_list &= reader.done
        return end

    def after(self, text: str, i: int, out: list[Delta]) -> int:
        """Behind a call: another one, the end of the list, the end marker, or content."""
        found = NOT_SPACE.search(text, i)
        if found is None:
            self._space_after_call.append(text[i:])
            return len(text)
        self._space_after_call.append(text[i : found.start()])
        i, c = found.start(), found.group()
        if self._end is not None and is_partial_marker(text, i, self._end):
            return self.wait(text, i)
        behind, self._space_after_call = "".join(self._space_after_call), []
        if self._in_list and c == "]":
            self._in_list = False
            return i + 1
        if c == ("," if self._in_list else self._separator):
            self.open(behind + c)
            return i + 1
        if self._bare and c == "{" and not self._in_list:
            self.open(behind)
            return i
        self._in_list = False
        self.state = self.content
        if self._end is not None and text.startswith(self._end, i):
            self._unclosed = False
            return i + len(self._end)
        self._space.append(behind)
        return i

    # What the states are made of.

    def say(self, text: str, out: list[Delta]) -> None:
        """Gives out content, but for white space at its end."""
        said = text.rstrip()
        if said:
            out.append(ContentDelta("".join(self._space) + said))
            self._space = []
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def wait(self, text: str, i: int) -> int:
        """Keeps the text from `i` on until more has come. It must be shorter than a marker."""
        self._tail = text[i:]
        return len(text)

    def hold(self, text: str, i: int, end: int) -> int:
        """Keeps what may be part of a call, in case that it is not; returns `end`."""
        if end > i:
            self._held.append(text[i:end])
        return end

    def open(self, marker: str) -> None:
        """A call should follow `marker`."""
        self._held = [marker]
        self.state = self.opening

    def read_call(self) -> None:
        """An object that says all of a call follows."""
        self._reader = ToolCallReader(self.num_calls, strict=self._strict, make_id=self._make_id)
        self.state = self.call

    def read_arguments(self, name: str) -> None:
        """The arguments of a call follow, whose function's name is known."""
        self._reader = ToolCallReader(self.num_calls, name, make_id=self._make_id)
        self.state = self.call

    def give_up(self, i: int, out: list[Delta]) -> int:
        """What was held was no call but content; reading goes on at `i`."""
        self._reader = None
        self._in_list = False
        self.say("".join(self._held), out)
        self._held = []
        self.state = self.content
        return i


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind, put together."""
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
