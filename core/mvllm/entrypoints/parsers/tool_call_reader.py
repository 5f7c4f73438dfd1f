"""Incremental parser of one tool call: a JSON object with the function's name and arguments, in any order.

The first delta is emitted when the object is certainly a call: its name is known and its arguments begin, or the object
has ended. From then on each piece of the arguments is emitted as it arrives. The caller keeps the text until then, to
emit it as content if the object is not a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from mvllm.entrypoints.parsers.interface import Delta, ToolCallDelta, make_call_id
from mvllm.entrypoints.parsers.json_stream import QUOTES, JsonValueReader, can_begin_value, unquote

NOT_SPACE = re.compile(r"\S")

_ARGUMENTS = ("arguments", "parameters")
_KNOWN_KEYS = frozenset({"name", *_ARGUMENTS, "type", "id"})

_OBJECT, _KEY, _COLON, _VALUE, _MORE = "object", "key", "colon", "value", "more"


class CallReader(Protocol):
    """Parser of one call. ToolCallReader reads JSON; other formats have readers of their own.

    Attributes:
        index: Number of the call in the output.
        started: The text is a call, and its first delta was emitted.
        done: The end of the call was found.
        failed: The next character cannot be part of a call.
    """

    index: int
    started: bool
    done: bool
    failed: bool

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        """Parses from `start`, appends deltas to `out`, and returns the index of the first unread character.

        If the call goes on, unread text may be the beginning of a marker: it is given again, with the next piece.
        """

    def finish(self, out: list[Delta], rest: str = "") -> None:
        """Ends the text after `rest`, the unread characters: emits the remaining arguments if the call has started."""


class ToolCallReader:
    """Parser of one call. See CallReader.

    Args:
        index: Number of the call in the output.
        name: The function's name, if the text is the arguments alone; else None.
        strict: Whether the object must have a name and arguments, and no unknown key. For formats without markers,
            where an object may be content.
        make_id: Makes the call's id.
    """

    def __init__(
        self,
        index: int,
        name: str | None = None,
        *,
        strict: bool = False,
        make_id: Callable[[], str] = make_call_id,
    ) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.index = index
        self._name = name
        self._strict = strict
        self._make_id = make_id
        self._arguments_only = name is not None
        self._expected = _OBJECT if name is None else _VALUE
        self._key: str | None = _ARGUMENTS[0] if name is not None else None
        self._value: JsonValueReader | None = None
        self._value_text: list[str] = []  # of a key, a name, or arguments that cannot be emitted yet
        self._streams_arguments = False  # whether the current value is arguments that can be emitted
        self._arguments: list[str] | None = None  # arguments before the name

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        """Parses from `start`, appends deltas to `out`, and returns the index of the first unread character."""
        i = start
        while i < len(text) and not (self.done or self.failed):
            i = self._read_structure(text, i, out) if self._value is None else self._read_value(text, i, out)
        return i

    def finish(self, out: list[Delta], rest: str = "") -> None:
        """Ends the text: emits the remaining arguments if the call has started. No text remains unread."""
        if self._value is not None:
            held: list[str] = []
            self._value.finish(held)
            self._value_text += held
            if self._key in _ARGUMENTS:
                self._emit_arguments("".join(self._value_text), out)
        self._value = None

    def _read_structure(self, text: str, i: int, out: list[Delta]) -> int:
        found = NOT_SPACE.search(text, i)
        if found is None:
            return len(text)
        i, c = found.start(), found.group()
        expected = self._expected
        if expected == _OBJECT and c == "{":
            self._expected = _KEY
        elif expected == _KEY and c in QUOTES:
            self._value, self._value_text, self._key = JsonValueReader(), [], None
            self._streams_arguments = False
            return i
        elif expected == _COLON and c == ":":
            self._expected = _VALUE
        elif expected == _VALUE and can_begin_value(c):
            return self._begin_value(i, c, out)
        elif expected == _MORE and c == ",":
            self._expected = _KEY
        elif expected in (_KEY, _MORE) and c == "}":
            self._end(out)
        else:
            self._fail(out)
            return i
        return i if self.failed else i + 1

    def _begin_value(self, i: int, c: str, out: list[Delta]) -> int:
        misplaced = self._key == "name" and self._name is None and c not in QUOTES
        if misplaced or (self._arguments_only and c != "{"):
            self._fail(out)
            return i
        self._value, self._value_text = JsonValueReader(), []
        self._streams_arguments = False
        if self._key in _ARGUMENTS:
            if c == "[":
                self._fail(out)
                return i
            self._streams_arguments = c == "{"
            if self._name is None:
                self._arguments = []
            elif self._streams_arguments:
                self._begin(out)
        return i

    def _read_value(self, text: str, i: int, out: list[Delta]) -> int:
        assert self._value is not None
        pieces: list[str] = []
        i = self._value.feed(text, i, pieces)
        if self._streams_arguments:
            self._emit_arguments("".join(pieces), out)
        else:
            self._value_text += pieces
        if self._value.failed:
            self._fail(out)
        elif self._value.done:
            self._value = None
            self._end_value(out)
        return i

    def _end_value(self, out: list[Delta]) -> None:
        text = "".join(self._value_text)
        if self._expected == _KEY:
            self._key = self._normalize_key(unquote(text))
            self._expected = _COLON
            if self._strict and self._key not in _KNOWN_KEYS:
                self._fail(out)
            return
        self._expected = _MORE
        if self._key == "name" and self._name is None:
            self._name = unquote(text)
            if not self._name:
                self._fail(out)
            elif self._arguments is not None:
                self._begin(out)
                self._emit_arguments("".join(self._arguments), out)
        elif self._key in _ARGUMENTS:
            if not self._streams_arguments and not self._take_arguments(_as_arguments(text), out):
                return
            if self._arguments_only:
                self.done = True

    def _take_arguments(self, text: str | None, out: list[Delta]) -> bool:
        """Emits arguments that are not written as an object; without any the text is no call. Returns whether it is."""
        if text is None:
            self._fail(out)
            return False
        if self._name is not None:
            self._begin(out)
        self._emit_arguments(text, out)
        return True

    def _normalize_key(self, key: str) -> str:
        """The key to use: repeated arguments are ignored, like `type`."""
        return "type" if key in _ARGUMENTS and (self.started or self._arguments is not None) else key

    def _end(self, out: list[Delta]) -> None:
        if not self.started:
            if self._name is None or self._strict:
                self._fail(out)
                return
            self._begin(out)
            self._emit_arguments("{}", out)
        self.done = True

    def _fail(self, out: list[Delta]) -> None:
        self.finish(out)
        self.failed = True

    def _begin(self, out: list[Delta]) -> None:
        self.started = True
        out.append(ToolCallDelta(self.index, self._make_id(), self._name))

    def _emit_arguments(self, text: str, out: list[Delta]) -> None:
        if not text:
            return
        if self.started:
            out.append(ToolCallDelta(self.index, arguments=text))
        elif self._arguments is not None:
            self._arguments.append(text)


def _as_arguments(text: str) -> str | None:
    """Arguments that are not an object: null and empty strings become `{}`, a string with an object its content.

    Others are None.
    """
    if text == "null":
        return "{}"
    if text[:1] == '"':
        inner = unquote(text)
        if not inner.strip():
            return "{}"
        if inner.lstrip().startswith("{"):
            return inner
    return None
