"""Incremental parser of calls in Python's syntax: the common part of the pythonic formats.

    [get_weather(city="Paris", days=3), get_time()]                                     a list, alone or in markers
    <function_calls>\nget_weather(city="Paris", days=3)\nget_time()\n</function_calls>  lines in markers

Values are literals, which become JSON: strings, numbers, `True`, `None`, lists and dicts. Nothing is evaluated. Without
a marker a list may also be content, so it counts as calls only at the beginning of the text or of a line, and if a
name, a parenthesis, and a keyword or the closing parenthesis follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mvllm.entrypoints.parsers.argument_types import quote
from mvllm.entrypoints.parsers.interface import Delta, ToolCallDelta, make_call_id
from mvllm.entrypoints.parsers.json_stream import JsonValueReader, can_begin_value
from mvllm.entrypoints.parsers.marked_calls import MarkedCalls
from mvllm.entrypoints.parsers.markers import compile_markers
from mvllm.entrypoints.parsers.tool_call_reader import NOT_SPACE

MAX_NAME = 128
"""Characters of a name; a longer one is content."""

_NAME = re.compile(r"[\w.\-]+")
_KEYWORD = re.compile(r"\w+")
_NAME_START = re.compile(r"[^\W\d]")
_SPACES = re.compile(r"\s+")

_KEY, _EQUALS, _VALUE, _MORE = range(4)


class KeywordArgumentsReader:
    """Parser of one call's arguments after the opening parenthesis. See CallReader.

    Args:
        index: Number of the call in the output.
        name: The function's name.
        make_id: Makes the call's id.
    """

    def __init__(self, index: int, name: str, make_id: Callable[[], str] = make_call_id) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.index = index
        self._name = name
        self._make_id = make_id
        self._expected = _KEY
        self._key = ""
        self._has_arguments = False
        self._value: JsonValueReader | None = None

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        """Parses from `start`, appends deltas to `out`, and returns the index of the first unread character."""
        i = start
        while i < len(text) and not (self.done or self.failed):
            if self._value is not None:
                i = self._read_value(text, i, out)
                continue
            found = NOT_SPACE.search(text, i)
            if found is None:
                return len(text)
            i = self._read_structure(text, found.start(), out)
        return i

    def finish(self, out: list[Delta], rest: str = "") -> None:
        """Ends the text: emits the remaining arguments if the call has started."""
        pieces: list[str] = []
        if self._value is not None:
            self._value.finish(pieces)
        self._value = None
        self._emit("".join(pieces), out)

    def _read_structure(self, text: str, i: int, out: list[Delta]) -> int:
        c, expected = text[i], self._expected
        if expected == _KEY and not self._key and c == ")":
            self._end(out)
        elif expected == _KEY and (found := _KEYWORD.match(text, i)) and len(self._key) < MAX_NAME:
            self._key += found.group()[:MAX_NAME]
            if found.end() < len(text):
                self._expected = _EQUALS
            return found.end()
        elif expected in (_KEY, _EQUALS) and self._key and c == "=":
            self._begin(out)
            self._emit(f"{', ' if self._has_arguments else '{'}{quote(self._key)}: ", out)
            self._key, self._has_arguments = "", True
            self._expected = _VALUE
        elif expected == _VALUE and can_begin_value(c):
            self._value = JsonValueReader()
            self._expected = _MORE
            return i
        elif expected == _MORE and c == ",":
            self._expected = _KEY
        elif expected == _MORE and c == ")":
            self._end(out)
        else:
            self._fail(out)
            return i
        return i + 1

    def _read_value(self, text: str, i: int, out: list[Delta]) -> int:
        assert self._value is not None
        pieces: list[str] = []
        i = self._value.feed(text, i, pieces)
        self._emit("".join(pieces), out)
        if self._value.failed:
            self._fail(out)
        elif self._value.done:
            self._value = None
        return i

    def _begin(self, out: list[Delta]) -> None:
        if not self.started:
            self.started = True
            out.append(ToolCallDelta(self.index, self._make_id(), self._name))

    def _end(self, out: list[Delta]) -> None:
        self._begin(out)
        self._emit("}" if self._has_arguments else "{}", out)
        self.done = True

    def _fail(self, out: list[Delta]) -> None:
        self.finish(out)
        self.failed = True

    def _emit(self, text: str, out: list[Delta]) -> None:
        if text and self.started:
            out.append(ToolCallDelta(self.index, arguments=text))


class PythonicCalls(MarkedCalls):
    """Incremental parser of calls in Python's syntax.

    Args:
        start, end: Markers around the calls; None if the format has none.
        bare_lists: Whether a list without markers at the beginning of the text or of a line counts as calls.
    """

    def __init__(self, start: str | None = None, end: str | None = None, *, bare_lists: bool = True) -> None:
        super().__init__(start if start is not None else (), end, bare=False)
        self._bare_lists = bare_lists
        self._marked = False  # inside of markers
        self._at_line = True  # only white space since the beginning of the text or of a line
        self._name = ""
        self._content_pattern = compile_markers((*self._markers, "\n")) if bare_lists else self._pattern

    def content(self, text: str, i: int, out: list[Delta]) -> int:
        """State outside of calls."""
        if self._bare_lists and self._at_line:
            if (spaces := _SPACES.match(text, i)) is not None:
                self.say(spaces.group(), out)
                return spaces.end()
            self._at_line = False
            if text[i] == "[":
                self.open("")
                return i
        found = self._content_pattern.search(text, i)
        if found is not None and found.group() == "\n":
            self.say(text[i : found.end()], out)
            self._at_line = True
            return found.end()
        self._marked = found is not None and found.group() in self._starts
        return super().content(text, i, out)

    def opening(self, text: str, i: int, out: list[Delta]) -> int:
        """State before a call: a bracket, or a function's name."""
        found = NOT_SPACE.search(text, i)
        if found is None:
            return self.hold(text, i, len(text))
        i = self.hold(text, i, found.start())
        c = found.group()
        if c == "[" and not self._in_list:
            self._in_list = True
            return self.hold(text, i, i + 1)
        if not _NAME_START.match(c):
            return self.give_up(i, out)
        self._name = ""
        self.state = self._read_name
        return i

    def after(self, text: str, i: int, out: list[Delta]) -> int:
        """State after a call: another call, the end of the list, the end marker, or content follows."""
        found = NOT_SPACE.search(text, i)
        if found is None:
            return super().after(text, i, out)
        space = "".join(self._space_after_call) + text[i : found.start()]
        if self._marked and not self._in_list and _NAME_START.match(found.group()):
            self._space_after_call = []
            self.open(space)
            return found.start()
        i = super().after(text, i, out)
        if self.state == self.content:
            self._marked = False
            self._at_line = "\n" in space
        return i

    def give_up(self, i: int, out: list[Delta]) -> int:
        """Emits the stored text as content; parsing continues at `i`."""
        self._marked = False
        return super().give_up(i, out)

    def _read_name(self, text: str, i: int, out: list[Delta]) -> int:
        found = _NAME.match(text, i)
        if found is not None:
            self._name += found.group()[: MAX_NAME + 1]
            i = self.hold(text, i, found.end())
            return i if len(self._name) <= MAX_NAME else self.give_up(i, out)
        if text[i] != "(":
            return self.give_up(i, out)
        self.read_with(KeywordArgumentsReader(self.num_calls, self._name, self._make_id))
        return self.hold(text, i, i + 1)
