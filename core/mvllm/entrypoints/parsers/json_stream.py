"""Reads one JSON value out of text that is still coming, and passes its text on as it comes.

The idea: to know where a value ends one needs to know strings from the rest, and how deep the brackets are; nothing is
parsed, nothing is evaluated, nothing recurses. Valid JSON is passed on exactly as it was written. Models also write
what is nearly JSON: Python's spellings (`None`, `True`, `False`, 'single quotes') and line breaks within strings. Those
are never valid JSON, so they can be turned into it while the rest stays as it is.
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
    """Whether a value may begin so."""
    return character in "{[\"'+-." or (character.isascii() and character.isalnum())


class JsonValueReader:
    """One value, from its first character on.

    Attributes:
        done: Its end was seen.
        broken: A `<` stood outside of a string, which no value has: a marker may begin there. It was not consumed.
    """

    __slots__ = ("_depth", "_escaped", "_in_plain_word", "_quote", "_scalar", "_word", "done", "failed")

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._word: str | None = None  # the word that is being read, while it may be one of Python's
        self._in_plain_word = False  # within a word that is none
        self._scalar: list[str] | None = None

    def feed(self, text: str, start: int, out: list[str]) -> int:
        """Reads on from `start`, appends to `out` what is to be passed on, and returns where it stopped."""
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
        """There is no more text: passes on what was held back."""
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
    """The string that a JSON string stands for; what is between the quotes where that is not to be told."""
    try:
        value = json.loads(text)
        value.encode()  # half of a surrogate pair could not be sent to anybody
    except ValueError:
        return text[1:-1]
    assert isinstance(value, str)
    return value


def _escape(c: str) -> str:
    """What a backslash before `c` becomes."""
    if c == "'":
        return c
    if c == "x":
        return "\\u00"  # Python's \x41
    return "\\" + c if c >= " " else "\\\\" + json.dumps(c)[1:-1]
