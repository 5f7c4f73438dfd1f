"""Values of calls in Python's syntax as JSON. Literals are parsed with `ast`; nothing is evaluated.

    "a\\n" 'b'  r"\\d+"  \"\"\"two\\nlines\"\"\"  "a" + "b"      strings, also adjacent ones and sums
    3  -.5  1_000  0x1F  True  None  true  null           numbers and constants, also JSON's names
    [1, 2,]  (1, 2)  {1, 2}  {"a": 1}                     lists, tuples and sets become arrays, dicts objects
    Paris  f"{x}"  g(1)  1j                               anything else becomes a string of its source text

A value that begins with a plain string is emitted while it arrives, any other value when it is complete.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

from mvllm_parsers.argument_types import escape, quote

MAX_LITERAL = 1 << 20
"""Characters of a literal that is not a plain string; a longer one is passed as its source text."""

MAX_DEPTH = 64
"""Nested brackets of a literal; a deeper one is passed as its source text."""

MAX_SIGNS = 100
"""Signs in one member of a literal, concatenations included."""

_OUTSIDE = re.compile(r"[\"'()\[\]{},<#\\]")
_BODY = {q: re.compile(rf"[^{q}\\]*(?:\\.[^{q}\\]*)*", re.DOTALL) for q in "\"'"}
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_PARTIAL_ESCAPE = re.compile(
    rf"(?<!\\)(?:\\\\)*((?:{_HIGH})?\\(?:[0-7]{{0,2}}|x[0-9a-fA-F]?|u[0-9a-fA-F]{{0,3}}|U[0-9a-fA-F]{{0,7}}"
    rf"|N(?:\{{[^{{}}\n]{{0,80}})?|\r)|{_HIGH})\Z"
)
_ESCAPE = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|N\{(?P<name>[^{}\n]{1,80})\}|(?P<other>\r?\n|.))",
    re.DOTALL,
)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "", "\r\n": ""}
_SIMPLE |= {c: c for c in "\\'\""}
_SURROGATE = re.compile("[\ud800-\udfff]")
_PREFIX = re.compile(r"(?<!\w)(?:[uU]|[bB]?[rR]?|[rR][bB])\Z")
_STRING_PREFIX = re.compile(r"(?<!\w)(?:[uU]|[bB][rR]?|[rR][bB]?)(?='[0-9]+;')")
_ALLOWED = re.compile(r"(?:'[0-9]+;'|[\w.,:+\-\[\](){}\s])*")
_CALL = re.compile(r"[\w'\])}]\s*[(\[{]")
_WORD = re.compile(r"\w+")
_STRING = re.compile(r"'[0-9]+;'")
_SEPARATORS = re.compile(r"[,:\[\](){}]")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*(?:[eE][0-9_]*)?")
_CONSTANTS: dict[str, Any] = {"None": None, "True": True, "False": False, "null": None, "true": True, "false": False}


class PythonValueReader:
    """Incremental parser of one value, from its first character to the comma or bracket after it.

    Attributes:
        done: The end of the value was found; it is not consumed. A `<` is one, too: a marker may begin there.
        is_literal: Whether the value is a literal, or begins with a plain string. Valid when it is done.
        is_empty: Nothing but comments was found.
    """

    def __init__(self) -> None:
        self.done = False
        self.is_literal = True
        self.is_empty = True
        self._source: list[str] = []  # without comments; after a plain string the text that follows it
        self._strings: list[list[str]] = []  # the strings in it
        self._skeleton: list[str] = []  # the source with the numbers of strings in their place
        self._last = ""  # the last characters of the skeleton
        self._depth = 0
        self._deepest = 0
        self._in_comment = False
        self._quote = ""  # around the current string
        self._prefix = ""  # before the current string
        self._is_plain = False  # whether the value begins with a plain string
        self._streams = False  # within that string

    def feed(self, text: str, start: int, out: list[str]) -> int:
        """Parses from `start`, appends JSON text to `out`, and returns the index of the first unread character.

        Unread text may begin a longer token: it is given again, with the next piece.
        """
        i = start
        while i < len(text) and not self.done:
            before = i, self._in_comment
            if self._quote:
                i = self._read_string(text, i, out)
            elif self._in_comment:
                at = text.find("\n", i)
                self._in_comment = at < 0
                i = at if at >= 0 else len(text)
            else:
                i = self._read_outside(text, i, out)
            if (i, self._in_comment) == before:
                break
        return i

    def finish(self, out: list[str]) -> None:
        """Ends the text within the value: emits the rest of a literal that is complete as far as one sees."""
        if self._is_plain and not self._streams:
            out.append('"')
        elif not (self._is_plain or self._quote or self.is_empty) and (found := self._literal()) is not None:
            out.append(found)

    def _read_outside(self, text: str, i: int, out: list[str]) -> int:
        found = _OUTSIDE.search(text, i)
        end = found.start() if found else len(text)
        self._keep(text[i:end])
        if found is None:
            return end
        c = found.group()
        if c in "\"'":
            return self._open_string(text, end, out)
        if c == "\\":
            if end + 1 == len(text):
                return end
            continues = text[end + 1] == "\n"
            self._keep(" " if continues else c)
            return end + 1 + continues
        if c == "#":
            self._in_comment = True
            return end + 1
        if c == "<" or (c in ",)]}" and not self._depth):
            self._end(out)
            return end
        if c != ",":
            self._depth += 1 if c in "([{" else -1
            self._deepest = max(self._deepest, self._depth)
        self._keep(c)
        return end + 1

    def _open_string(self, text: str, i: int, out: list[str]) -> int:
        c = text[i]
        if len(text) - i < 3 and text[i:] in (c, c * 2):
            return i
        self._quote = c * 3 if text.startswith(c * 3, i) else c
        if self.is_empty:
            self._is_plain = self._streams = True
            self.is_empty = False
            out.append('"')
        else:
            self._open_part()
            self._source.append(self._quote)
        return i + len(self._quote)

    def _read_string(self, text: str, i: int, out: list[str]) -> int:
        c = self._quote[0]
        found = _BODY[c].match(text, i)
        assert found is not None
        end = found.end()
        if text.startswith(self._quote, end):
            self._keep_string(text[i:end], out)
            end += len(self._quote)
            if not self._streams:
                self._source.append(self._quote)
                self._close_part()
            self._quote, self._streams = "", False
            return end
        if text.startswith(c, end):  # within a long string
            if len(text) - end < 3 and self._quote.startswith(text[end:]):
                self._keep_string(text[i:end], out)
                return end
            end += 1
        else:  # the end of the text, perhaps within an escape
            end = len(text)
            if partial := _PARTIAL_ESCAPE.search(text[i:]):
                end = i + partial.start(1)
        self._keep_string(text[i:end], out)
        return end

    def _open_part(self) -> None:
        """Begins a string within a literal."""
        found = _PREFIX.search(self._last)
        self._prefix = found.group().lower() if found else ""
        self._last = "'"
        self._skeleton.append(f"'{len(self._strings)};'")
        self._strings.append([])

    def _close_part(self) -> None:
        """Ends a string within a literal."""
        text = "".join(self._strings[-1])
        if "b" in self._prefix:
            with contextlib.suppress(UnicodeError):
                text = text.encode("latin-1").decode()
        self._strings[-1] = [_join_surrogates(text)]

    def _keep(self, text: str) -> None:
        """Adds source text outside of strings."""
        if text:
            self._source.append(text)
            self._skeleton.append(text)
            self._last = (self._last + text)[-3:]
            self.is_empty = self.is_empty and not text.strip()

    def _keep_string(self, text: str, out: list[str]) -> None:
        """Emits a piece of a plain string, or adds it to the source."""
        if self._streams:
            if text:
                out.append(escape(_decode(text)))
            return
        self._source.append(text)
        self._strings[-1].append(text if "r" in self._prefix else _decode(text))

    def _literal(self, *, follows_string: bool = False) -> str | None:
        """The JSON text of the literal; None if it is none."""
        if self._deepest > MAX_DEPTH:
            return None
        skeleton = "".join([f"'{len(self._strings)};'" if follows_string else "", *self._skeleton])
        return _literal_json(skeleton, ["".join(pieces) for pieces in [*self._strings, []]])

    def _end(self, out: list[str]) -> None:
        self.done = True
        source = "".join(self._source).rstrip()
        if not self._is_plain:
            found = self._literal()
            self.is_literal = found is not None
            if not self.is_empty:
                out.append(quote(source.lstrip()) if found is None else found)
        elif source:  # another string is appended, or something else
            found = self._literal(follows_string=True)
            out.append(found[1:] if found is not None and found.startswith('"') else f'{escape(source)}"')
        else:
            out.append('"')


def _literal_json(skeleton: str, strings: Sequence[str]) -> str | None:
    """The JSON text of a literal; None if the source is none.

    Args:
        skeleton: The source, with `'0;'`, `'1;'`, ... in place of strings. Its brackets are not too deep.
        strings: The strings.
    """
    skeleton = _STRING_PREFIX.sub("", skeleton)
    if len(skeleton) > MAX_LITERAL or _ALLOWED.fullmatch(skeleton) is None or _CALL.search(skeleton):
        return None
    words = _WORD.findall(_STRING.sub("", skeleton))
    if not all(word in _CONSTANTS or _NUMBER.fullmatch(word) for word in words):
        return None
    if any(part.count("+") + part.count("-") > MAX_SIGNS for part in _SEPARATORS.split(skeleton)):
        return None
    try:
        node = ast.parse(f"({skeleton.strip()}\n)", mode="eval").body
        return json.dumps(_value(node, strings), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


def _value(node: ast.expr, strings: Sequence[str]) -> Any:
    match node:
        case ast.Constant(value=str(numbers)):
            return "".join(strings[int(number)] for number in numbers.split(";")[:-1])
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=members) | ast.Tuple(elts=members) | ast.Set(elts=members):
            return [_value(member, strings) for member in members]
        case ast.Dict(keys=keys, values=values):
            return {_key(key, strings): _value(value, strings) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _value(operand, strings)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = _value(left, strings), _value(right, strings)
            if isinstance(parts[0], str) and isinstance(parts[1], str):
                return parts[0] + parts[1]
    raise ValueError("not a literal")


def _key(node: ast.expr | None, strings: Sequence[str]) -> Any:
    """A key of a dict, of a type that JSON's names can be made of."""
    key = None if node is None else _value(node, strings)
    if node is None or isinstance(key, list | dict):
        raise ValueError("not a literal")
    return key


def _decode(text: str) -> str:
    """The text between the quotes of a string. Escapes that Python does not have stay as they are."""
    if "\\" not in text:
        return text
    return _join_surrogates(_ESCAPE.sub(_character, text))


def _character(found: re.Match[str]) -> str:
    if found["octal"]:
        return chr(int(found["octal"], 8))
    if digits := found["x"] or found["u"] or found["U"]:
        return chr(int(digits, 16)) if int(digits, 16) <= sys.maxunicode else found.group()
    if found["name"]:
        try:
            return unicodedata.lookup(found["name"])
        except KeyError:
            return found.group()
    return _SIMPLE.get(found["other"], found.group())


def _join_surrogates(text: str) -> str:
    """The text with pairs of surrogates as one character, and U+FFFD for half of a pair, which cannot be sent."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
