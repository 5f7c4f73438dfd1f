"""Checks the arguments of tool calls while they arrive: what is sent is the text of a JSON object.

Valid JSON is passed on unchanged. A comma and a key are held back until their value begins, numbers and words until
they are complete, so that the object can be closed after any piece. What is not JSON but means one thing is written as
JSON: escapes and numbers that only Python has, line breaks in strings, `NaN`, a comma before a closing bracket. At
anything else the object is closed, and the rest of the arguments is dropped.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from mvllm.entrypoints.parsers.deltas import Delta, ToolCallDelta

MAX_DEPTH = 128
"""Nested brackets; the arguments are closed before a deeper one."""

_SPACE = re.compile(r"[ \t\r\n]*")
_TEXT = re.compile(r'[^"\\\x00-\x1f]*')
_UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_PARTIAL_UNICODE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"[^\s,:\[\]{}\"']*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"None": "null", "True": "true", "False": "false", "NaN": "null", "Infinity": "null", "-Infinity": "null"}
_WORDS |= {word: word for word in ("null", "true", "false")}
_START, _FIRST_KEY, _KEY, _COLON, _VALUE, _FIRST_VALUE, _MORE, _DONE = range(8)


class ArgumentsChecker:
    """Incremental check of one call's arguments."""

    def __init__(self) -> None:
        self._expected = _START
        self._open: list[str] = []  # brackets
        self._held: list[str] = []  # a comma, a key and a colon, until their value begins
        self._in_string = False
        self._is_key = False  # whether the string is a key
        self._scalar: list[str] | None = None
        self._tail = ""  # the end of the last piece, if it may begin an escape
        self._has_sent = False

    def feed(self, text: str) -> str:
        """The text to send for the next piece."""
        text = self._tail + text
        self._tail = ""
        out: list[str] = []
        i = 0
        while i < len(text) and self._expected != _DONE:
            if self._in_string:
                i = self._read_string(text, i, out)
            elif self._scalar is not None:
                i = self._read_scalar(text, i, self._scalar, out)
            else:
                i = self._read_structure(text, i, out)
        return self._sent(out)

    def finish(self, *, is_cut: bool) -> str:
        """The text to send at the end: what closes the object.

        Args:
            is_cut: The output was cut off within the call: the object remains open, so that nobody takes it for all.
        """
        out: list[str] = []
        if is_cut:
            return "" if self._has_sent else "{"
        if self._scalar is not None:
            self._end_scalar(self._scalar, out)
        elif self._in_string and not self._is_key and self._tail:
            out.append(json.dumps(self._tail)[1:-1])
        self._close_all(out)
        return self._sent(out)

    def _sent(self, out: list[str]) -> str:
        text = "".join(out)
        self._has_sent |= bool(text)
        return text

    def _read_structure(self, text: str, i: int, out: list[str]) -> int:
        found = _SPACE.match(text, i)
        assert found is not None
        expected = self._expected
        if found.group():
            (out if expected in (_MORE, _FIRST_KEY, _FIRST_VALUE) else self._held).append(found.group())
            return found.end()
        c = text[i]
        if expected == _START and c == "{":
            self._held = []
            self._open_bracket(c, out)
        elif c == '"' and expected in (_FIRST_KEY, _KEY, _VALUE, _FIRST_VALUE):
            self._in_string, self._is_key = True, expected in (_FIRST_KEY, _KEY)
            self._release(out)
            (self._held if self._is_key else out).append(c)
        elif expected == _COLON and c == ":":
            self._held.append(c)
            self._expected = _VALUE
        elif expected in (_VALUE, _FIRST_VALUE) and c in "{[" and len(self._open) < MAX_DEPTH:
            self._release(out)
            self._open_bracket(c, out)
        elif expected == _MORE and c == ",":
            self._held = [c]
            self._expected = _KEY if self._open[-1] == "{" else _VALUE
        elif self._may_close(c):
            self._held = []
            self._close(out)
        elif expected in (_VALUE, _FIRST_VALUE) and c not in ",:{}[]'":
            self._scalar = []
            return i
        else:
            self._close_all(out)
        return i + 1

    def _may_close(self, c: str) -> bool:
        """Whether the bracket may be closed, also after a comma."""
        if c == "}":
            return self._open[-1:] == ["{"] and self._expected in (_FIRST_KEY, _KEY, _MORE)
        return c == "]" and self._open[-1:] == ["["] and self._expected in (_FIRST_VALUE, _VALUE, _MORE)

    def _read_string(self, text: str, i: int, out: list[str]) -> int:
        target = self._held if self._is_key else out
        found = _TEXT.match(text, i)
        assert found is not None
        target.append(found.group())
        i = found.end()
        if i == len(text):
            return i
        c = text[i]
        if c == '"':
            target.append(c)
            self._in_string = False
            self._expected = _COLON if self._is_key else _MORE
            return i + 1
        if c != "\\":
            target.append(json.dumps(c)[1:-1])
            return i + 1
        end, escaped = _read_escape(text, i)
        if end == i:
            self._tail = text[i:]
            return len(text)
        target.append(escaped)
        return end

    def _read_scalar(self, text: str, i: int, read: list[str], out: list[str]) -> int:
        found = _SCALAR.match(text, i)
        assert found is not None
        read.append(found.group())
        if found.end() < len(text):
            self._end_scalar(read, out)
        return found.end()

    def _end_scalar(self, read: list[str], out: list[str]) -> None:
        self._scalar = None
        value = _scalar_json("".join(read))
        if value is None:
            self._close_all(out)
        else:
            self._release(out)
            out.append(value)
            self._expected = _MORE

    def _release(self, out: list[str]) -> None:
        """Emits what was held back for a value; a key is held back itself."""
        if not self._is_key or not self._in_string:
            out += self._held
            self._held = []

    def _open_bracket(self, c: str, out: list[str]) -> None:
        out.append(c)
        self._open.append(c)
        self._expected = _FIRST_KEY if c == "{" else _FIRST_VALUE

    def _close(self, out: list[str]) -> None:
        out.append("}" if self._open.pop() == "{" else "]")
        self._expected = _MORE if self._open else _DONE

    def _close_all(self, out: list[str]) -> None:
        if self._expected == _DONE:
            return
        if self._expected == _START:
            self._open_bracket("{", out)
        if self._in_string and not self._is_key:
            out.append('"')
        self._in_string, self._held = False, []
        while self._open:
            self._close(out)


class CallsChecker:
    """Checks the arguments in the deltas of one output, and closes those of calls that have ended."""

    def __init__(self) -> None:
        self._index = 0
        self._checker: ArgumentsChecker | None = None  # of the last call

    def check(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas to send."""
        if self._checker is None and not any(isinstance(delta, ToolCallDelta) for delta in deltas):
            return deltas
        out: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, ToolCallDelta):
                out += self.finish()
                out.append(delta)
                continue
            if delta.id is not None:
                out += self.finish()
                self._index, self._checker = delta.index, ArgumentsChecker()
            text = self._checker.feed(delta.arguments) if self._checker is not None else ""
            if text or delta.id is not None:
                out.append(replace(delta, arguments=text))
        return out

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Ends the last call. See ArgumentsChecker."""
        checker, self._checker = self._checker, None
        text = checker.finish(is_cut=is_cut) if checker is not None else ""
        return [ToolCallDelta(self._index, arguments=text)] if text else []


def _read_escape(text: str, i: int) -> tuple[int, str]:
    """The end of the escape at `i`, and its JSON text. The end is `i` if more text is needed."""
    if _PARTIAL_UNICODE.match(text, i):
        return i, ""
    c = text[i + 1]
    found = _UNICODE.match(text, i)
    if found is None:
        known = c in '"\\/bfnrt'
        return (i + 2, text[i : i + 2]) if known else (i + 2, c) if c == "'" else (i + 1, "\\\\")
    if not 0xD800 <= int(found.group(1), 16) < 0xE000:
        return found.end(), found.group()
    if int(found.group(1), 16) < 0xDC00:  # the first half of a pair
        if found.end() == len(text) or _PARTIAL_UNICODE.match(text, found.end()):
            return i, ""
        second = _UNICODE.match(text, found.end())
        if second is not None and 0xDC00 <= int(second.group(1), 16) < 0xE000:
            return second.end(), found.group() + second.group()
    return found.end(), "\\ufffd"


def _scalar_json(text: str) -> str | None:
    """A number or word as JSON; None if it is neither. Numbers may be written as in Python."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return text
    try:
        return json.dumps(int(text, 10 if text.lstrip("+-").isdigit() else 0))
    except ValueError:
        pass
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError:
        return None
