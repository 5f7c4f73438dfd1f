"""Incremental parser of Gemma's calls: objects with bare keys, and strings between special tokens.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,2],exact:true}<tool_call|>
    {"city": "Paris", "days": [1, 2], "exact": true}

Strings have no escapes. A bare value that is no literal is a string.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mvllm.extension_api.parsers import (
    NOT_SPACE,
    CallReader,
    Delta,
    ToolCallDelta,
    is_partial_marker,
    make_call_id,
    partial_marker_length,
)
from mvllm_parsers.argument_types import as_json, escape, quote
from mvllm_parsers.header_calls import HeaderCalls, function_name

_PREFIX = "call:"
_KEY_END = re.compile(r"[:{}\[\],]")
_BARE_END = re.compile(r"[,{}\[\]<]")
_VALUE, _KEY, _AFTER_KEY, _STRING, _BARE, _MORE = range(6)
_LITERALS = {"none": "null", "nil": "null"}
_MAX_KEY = 1024


class GemmaArgumentsReader:
    """Parser of one call's arguments, from the opening brace. See CallReader.

    Args:
        index: Number of the call in the output.
        name: The function's name.
        quotes: Text before and after a string.
        make_id: Makes the call's id.
    """

    def __init__(self, index: int, name: str, quotes: str, make_id: Callable[[], str] = make_call_id) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.index = index
        self._name = name
        self._quotes = quotes
        self._make_id = make_id
        self._state = _VALUE
        self._open: list[str] = []  # brackets
        self._is_empty = True  # whether the innermost bracket has no member yet
        self._is_key = False  # whether the current string is a key
        self._text: list[str] = []  # of a key or a bare value

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        """Parses from `start`, appends deltas to `out`, and returns the index of the first unread character."""
        if not self.started:
            self.started = True
            out.append(ToolCallDelta(self.index, self._make_id(), self._name))
        i = start
        pieces: list[str] = []
        states = (self._value, self._key, self._after_key, self._string, self._bare, self._more)
        while i < len(text) and not (self.done or self.failed):
            before, state = i, self._state
            if state not in (_STRING, _BARE):
                found = NOT_SPACE.search(text, i)
                if found is None:
                    i = len(text)
                    break
                i = found.start()
            i = states[state](text, i, pieces)
            if i == before and state == self._state:
                break  # the rest may begin a marker
        self._emit(pieces, out)
        return i

    def finish(self, out: list[Delta], rest: str = "") -> None:
        """Ends the text: emits the arguments so far. `rest` is the beginning of a marker."""
        if self._state == _BARE and (text := "".join(self._text)).strip():
            self._emit([_bare_value(text)], out)

    def _value(self, text: str, i: int, out: list[str]) -> int:
        c = text[i]
        if text.startswith(self._quotes, i):
            out.append('"')
            self._is_key, self._state = False, _STRING
            return i + len(self._quotes)
        if is_partial_marker(text, i, self._quotes):
            return i
        if c in "{[":
            out.append(c)
            self._open.append(c)
            self._is_empty = True
            self._state = _KEY if c == "{" else _VALUE
            return i + 1
        if c == "]" and self._open and self._open[-1] == "[" and self._is_empty:
            return self._close(i, out)
        if c in ",:}]<" or not self._open:
            self.failed = True
            return i
        self._text, self._state = [], _BARE
        return i

    def _key(self, text: str, i: int, out: list[str]) -> int:
        if text[i] == "}" and self._is_empty:
            return self._close(i, out)
        if text.startswith(self._quotes, i):
            self._text = []
            self._is_key, self._state = True, _STRING
            return i + len(self._quotes)
        if is_partial_marker(text, i, self._quotes):
            return i
        found = _KEY_END.search(text, i, i + _MAX_KEY)
        if found is None:
            self.failed = len(text) - i >= _MAX_KEY
            return i
        if found.group() != ":":
            self.failed = True
            return i
        self._add_key(text[i : found.start()].strip().strip("\"'"), out)
        return found.end()

    def _after_key(self, text: str, i: int, out: list[str]) -> int:
        if text[i] != ":":
            self.failed = True
            return i
        self._add_key("".join(self._text), out)
        return i + 1

    def _string(self, text: str, i: int, out: list[str]) -> int:
        at = text.find(self._quotes, i)
        end = at if at >= 0 else len(text) - partial_marker_length(text, i, (self._quotes,))
        if self._is_key:
            self._text.append(text[i:end])
        elif end > i:
            out.append(escape(text[i:end]))
        if at < 0:
            return end
        if self._is_key:
            self._state = _AFTER_KEY
        else:
            out.append('"')
            self._end_value()
        return at + len(self._quotes)

    def _bare(self, text: str, i: int, out: list[str]) -> int:
        found = _BARE_END.search(text, i)
        if found is None:
            self._text.append(text[i:])
            return len(text)
        self._text.append(text[i : found.start()])
        out.append(_bare_value("".join(self._text)))
        self._end_value()
        return found.start()

    def _more(self, text: str, i: int, out: list[str]) -> int:
        c, bracket = text[i], self._open[-1]
        if c == ",":
            out.append(", ")
            self._state = _KEY if bracket == "{" else _VALUE
            return i + 1
        if c == ("}" if bracket == "{" else "]"):
            return self._close(i, out)
        self.failed = True
        return i

    def _close(self, i: int, out: list[str]) -> int:
        out.append("}" if self._open.pop() == "{" else "]")
        self._end_value()
        self.done = not self._open
        return i + 1

    def _end_value(self) -> None:
        self._is_empty = False
        self._state = _MORE

    def _add_key(self, key: str, out: list[str]) -> None:
        out.append(f"{quote(key)}: ")
        self._is_empty = False
        self._state = _VALUE

    def _emit(self, pieces: list[str], out: list[Delta]) -> None:
        if text := "".join(pieces):
            out.append(ToolCallDelta(self.index, arguments=text))


class GemmaCalls(HeaderCalls):
    """Incremental parser of Gemma's calls.

    Args:
        start, end: Markers around a call.
        quotes: Text before and after a string.
    """

    def __init__(self, start: str, end: str, quotes: str) -> None:
        super().__init__(start, ("{",), (end,), closers=(quotes,), keep_separator=True)
        self._quotes = quotes

    def make_reader(self, header: str) -> CallReader | None:
        header = header.strip()
        name = function_name(header[len(_PREFIX) :]) if header.startswith(_PREFIX) else None
        return GemmaArgumentsReader(self.num_calls, name, self._quotes, self._make_id) if name is not None else None


def _bare_value(text: str) -> str:
    text = text.strip()
    word = _LITERALS.get(text.lower())
    found = word if word is not None else as_json(text)
    return quote(text) if found is None else found
