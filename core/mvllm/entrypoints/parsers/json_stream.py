"""Incremental scanner for one JSON value: finds its end and emits its text while the text arrives.

The scanner tracks strings and the depth of brackets; it does not parse and does not recurse. Valid JSON is emitted
unchanged. Python's spellings (`None`, `True`, `False`, 'single quotes') and line breaks in strings, which models also
generate and which are never valid JSON, are converted to JSON.
"""

from __future__ import annotations

import json
import re

QUOTES = "\"'"
OPENING = "{["

_PYTHON = {"None": "null", "True": "true", "False": "false"}
_STRING_STOPS = {'"': re.compile(r'["\\\x00-\x1f]'), "'": re.compile(r"['\"\\\x00-\x1f]")}
_OUTSIDE_STOPS = re.compile(r"[\"'{}\[\]<A-Za-z_]")
_WORD_END = re.compile(r"[^A-Za-z0-9_]")
_SCALAR_END = re.compile(r"[^A-Za-z0-9_+.\-]")


def can_begin_value(character: str) -> bool:
    """Whether a value may begin with this character."""
    return character in "{[\"'+-." or (character.isascii() and character.isalnum())


class JsonValueReader:
    """Scanner of one value, from its first character.

    Attributes:
        done: The end of the value was found.
        failed: A `<` was found outside of a string, which no value has: a marker may begin there. It is not consumed.
    """

    __slots__ = ("_depth", "_escaped", "_in_plain_word", "_quote", "_scalar", "_word", "done", "failed")

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._word: str | None = None  # the current word, while it may be one of Python's
        self._in_plain_word = False  # inside a word that is not one of Python's
        self._scalar: list[str] | None = None

    def feed(self, text: str, start: int, out: list[str]) -> int:
        """Scans `text` from `start`, appends emitted text to `out`, and returns the index where it stopped."""
        i = start
        while i < len(text) and not (self.done or self.failed):
            if self._quote:
                i = self._read_string(text, i, out)
            elif self._word is not None:
                i = self._read_word(text, i, out)
            elif self._scalar is not None:
                i = self._read_scalar(text, i, self._scalar, out)
            elif self._depth:
                i = self._read_outside(text, i, out)
            elif text[i] in OPENING or text[i] in QUOTES:
                i = self._read_structural(text, i, out)
            else:
                self._scalar = []
        return i

    def finish(self, out: list[str]) -> None:
        """Ends the text: emits what was held back."""
        if self._escaped:
            out.append("\\")
        out.append(self._word or "")
        out.append("".join(self._scalar or ()))
        self._escaped, self._word, self._scalar = False, None, None

    def _read_string(self, text: str, i: int, out: list[str]) -> int:
        if self._escaped:
            self._escaped = False
            out.append(_escape(text[i]))
            return i + 1
        stop = _STRING_STOPS[self._quote].search(text, i)
        if stop is None:
            out.append(text[i:])
            return len(text)
        out.append(text[i : stop.start()])
        c = stop.group()
        if c == self._quote:
            out.append('"')
            self._quote = ""
            self.done = not self._depth
        elif c == "\\":
            self._escaped = True
        else:
            out.append(json.dumps(c)[1:-1])
        return stop.end()

    def _read_outside(self, text: str, i: int, out: list[str]) -> int:
        stop = _OUTSIDE_STOPS.search(text, i)
        if stop is None:
            out.append(text[i:])
            return len(text)
        out.append(text[i : stop.start()])
        return self._read_structural(text, stop.start(), out)

    def _read_structural(self, text: str, i: int, out: list[str]) -> int:
        c = text[i]
        if c == "<":
            self.failed = True
            return i
        if c in QUOTES:
            self._quote = c
            out.append('"')
        elif c in OPENING:
            self._depth += 1
            out.append(c)
        elif c in "}]":
            self._depth -= 1
            self.done = not self._depth
            out.append(c)
        else:
            self._word, self._in_plain_word = "", False
            return i
        return i + 1

    def _read_word(self, text: str, i: int, out: list[str]) -> int:
        end = _WORD_END.search(text, i)
        piece = text[i : end.start() if end else len(text)]
        if self._in_plain_word:
            out.append(piece)
        else:
            self._word = f"{self._word}{piece}"
        if end is not None:
            out.append(_PYTHON.get(self._word or "", self._word or ""))
            self._word = None
        elif self._word and not any(known.startswith(self._word) for known in _PYTHON):
            out.append(self._word)
            self._word, self._in_plain_word = "", True
        return i + len(piece)

    def _read_scalar(self, text: str, i: int, read: list[str], out: list[str]) -> int:
        end = _SCALAR_END.search(text, i)
        read.append(text[i : end.start() if end else len(text)])
        if end is None:
            return len(text)
        word = "".join(read)
        out.append(_PYTHON.get(word, word))
        self._scalar = None
        self.done = True
        return end.start()


def unquote(text: str) -> str:
    """The value of a JSON string; the text between the quotes if it is invalid."""
    try:
        value = json.loads(text)
        value.encode()  # raises for half of a surrogate pair, which cannot be sent
    except ValueError:
        return text[1:-1]
    assert isinstance(value, str)
    return value


def _escape(c: str) -> str:
    """The JSON text for a backslash and `c`."""
    if c == "'":
        return c
    if c == "x":
        return "\\u00"  # Python's \x41
    return "\\" + c if c >= " " else "\\\\" + json.dumps(c)[1:-1]
