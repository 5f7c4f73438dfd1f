"""Incremental parser of calls in Python's syntax: the common part of the pythonic formats.

    [get_weather(city="Paris", days=3), get_time()]                                     a list, alone or in markers
    <function_calls>\nget_weather(city="Paris", days=3)\nget_time()\n</function_calls>  lines in markers

Values become JSON (`python_values`). Without a marker a list may also be content, so it counts as calls only at the
beginning of the text or of a line, and if a name, a parenthesis, and a keyword with a literal or the closing
parenthesis follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mvllm.extension_api.parsers import (
    NOT_SPACE,
    Delta,
    MarkedCalls,
    ToolCallDelta,
    compile_markers,
    is_partial_marker,
    make_call_id,
)
from mvllm_parsers.argument_types import quote
from mvllm_parsers.python_values import PythonValueReader

MAX_NAME = 128
"""Characters of a name; a longer one is content."""

_NAME = re.compile(r"[\w.\-]+")
_KEYWORD = re.compile(r"[\w.\-]+")
_NAME_START = re.compile(r"[^\W\d]")
_SPACES = re.compile(r"\s+")

_KEY, _EQUALS, _VALUE, _MORE = range(4)


class KeywordArgumentsReader:
    """Parser of one call's arguments after the opening parenthesis. See CallReader.

    The first delta is emitted with the first value. An argument without a name, or without a value, ends a call that
    has not started, and is dropped from one that has.

    Args:
        index: Number of the call in the output.
        name: The function's name.
        strict: Whether text whose first value is not a literal is no call.
        make_id: Makes the call's id.
    """

    def __init__(
        self, index: int, name: str, *, strict: bool = False, make_id: Callable[[], str] = make_call_id
    ) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.index = index
        self._name = name
        self._strict = strict
        self._make_id = make_id
        self._expected = _KEY
        self._key: str | None = ""  # None for the argument of `**`
        self._has_arguments = False
        self._in_comment = False
        self._value: PythonValueReader | None = None
        self._is_dropped = False  # whether the current value is not emitted
        self._pieces: list[str] = []  # of a value that is emitted when it is complete

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        """Parses from `start`, appends deltas to `out`, and returns the index of the first unread character."""
        i = start
        while i < len(text) and not (self.done or self.failed):
            before = i, self._expected, self._value, self._in_comment
            if self._value is not None:
                i = self._read_value(text, i, out)
            elif self._in_comment:
                at = text.find("\n", i)
                self._in_comment = at < 0
                i = at if at >= 0 else len(text)
            elif (found := NOT_SPACE.search(text, i)) is None:
                return len(text)
            else:
                i = self._read_structure(text, found.start(), out)
            if (i, self._expected, self._value, self._in_comment) == before:
                break  # the rest may begin a longer token
        return i

    def finish(self, out: list[Delta], rest: str = "") -> None:
        """Ends the text: emits the remaining arguments if the call has started."""
        if self._value is not None and self.started and not self._is_dropped:
            pieces: list[str] = []
            self._value.finish(pieces)
            if pieces and self._key is not None:
                self._emit_value("".join(pieces), out)
        self._value = None

    def _read_structure(self, text: str, i: int, out: list[Delta]) -> int:
        """Parses what stands between values, from a character that is not white space."""
        c = text[i]
        if c == "#":
            self._in_comment = True
            return i + 1
        if c == "\\" and text[i + 1 : i + 2] in ("", "\n"):  # continues a line
            return i + 1 if i + 1 < len(text) else i
        if self._expected == _VALUE:
            self._begin_value()
            return i
        if c == ")" and (self._expected == _MORE or not self._key):
            self._end(out)
            return i + 1
        if self._expected != _MORE:
            return self._read_key(text, i)
        if c == ",":
            self._expected, self._key = _KEY, ""
            return i + 1
        self._fail()
        return i

    def _read_key(self, text: str, i: int) -> int:
        """Parses a part of a keyword, the `=` after it, or the `**` of a dict."""
        key = self._key or ""
        if self._expected == _KEY and len(key) < MAX_NAME and (found := _KEYWORD.match(text, i)):
            self._key = key + found.group()[:MAX_NAME]
            if found.end() < len(text):
                self._expected = _EQUALS
            return found.end()
        if key and text[i] == "=":
            self._expected = _VALUE
            return i + 1
        if not key and is_partial_marker(text, i, "**"):
            return i
        if not key and text.startswith("**", i):
            self._key, self._expected = None, _VALUE
            return i + 2
        if self.started:
            self._begin_value(is_dropped=True)
        else:
            self._fail()
        return i

    def _begin_value(self, *, is_dropped: bool = False) -> None:
        self._value, self._is_dropped, self._pieces = PythonValueReader(), is_dropped, []
        self._expected = _MORE

    def _read_value(self, text: str, i: int, out: list[Delta]) -> int:
        value = self._value
        assert value is not None
        pieces: list[str] = []
        i = value.feed(text, i, pieces)
        if self._key is None:
            self._pieces += pieces
        elif not self._is_dropped and (value.is_literal or self.started or not self._strict):
            self._emit_value("".join(pieces), out)
        if value.done:
            self._value = None
            if self._key is None and not self._is_dropped:
                self._emit_members(out, is_literal=value.is_literal)
            elif value.is_empty or (self._strict and not value.is_literal):
                self.failed = not self.started
        return i

    def _emit_members(self, out: list[Delta], *, is_literal: bool) -> None:
        """Emits the members of a dict as arguments."""
        text = "".join(self._pieces)
        if not (is_literal and text.startswith("{")):
            self.failed = not self.started
        elif text == "{}":
            self._begin(out)
        else:
            self._begin(out)
            self._emit((", " if self._has_arguments else "{") + text[1:-1], out)
            self._has_arguments = True

    def _emit_value(self, text: str, out: list[Delta]) -> None:
        """Emits a piece of the value of the current key; the first one after the key."""
        if not text:
            return
        self._begin(out)
        if self._key:
            text = f"{', ' if self._has_arguments else '{'}{quote(self._key)}: {text}"
            self._key, self._has_arguments = "", True
        self._emit(text, out)

    def _begin(self, out: list[Delta]) -> None:
        if not self.started:
            self.started = True
            out.append(ToolCallDelta(self.index, self._make_id(), self._name))

    def _end(self, out: list[Delta]) -> None:
        self._begin(out)
        self._emit("}" if self._has_arguments else "{}", out)
        self.done = True

    def _fail(self) -> None:
        self.failed = True

    def _emit(self, text: str, out: list[Delta]) -> None:
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
        if (end := self.skip_empty(text, i)) is not None:
            return end
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
        self.read_with(
            KeywordArgumentsReader(self.num_calls, self._name, strict=not self._marked, make_id=self._make_id)
        )
        return self.hold(text, i, i + 1)
