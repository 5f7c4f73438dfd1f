"""Incremental parser of arguments in XML-like tags: the common part of Qwen3-Coder's, GLM's, MiniMax's and DSML calls.

    <parameter=city>\nParis\n</parameter>\n<parameter=days>3</parameter>\n</function>     {"city": "Paris", "days": 3}

Values are plain text without escapes; the function's schema says which are strings (`argument_types`). Strings are
emitted while they arrive, other values when they are complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mvllm.extension_api.parsers import (
    NOT_SPACE,
    OPENING,
    CallReader,
    Delta,
    ToolCallDelta,
    compile_markers,
    is_partial_marker,
    is_tag,
    make_call_id,
    partial_marker_length,
)
from mvllm_parsers.argument_types import STRING, ArgumentTypes, Types, escape, quote, to_json
from mvllm_parsers.header_calls import HeaderCalls, function_name

MAX_KEY = 256
"""Characters of an opening tag."""

_KEY = re.compile(r"""\s*(["']?)(?P<key>.*?)\1(?:\s+string=["']?(?P<string>true|false)["']?)?\s*""", re.DOTALL)


@dataclass(frozen=True)
class TagSyntax:
    """The tags around the arguments of a call.

    Attributes:
        key_start: Text before an argument's name.
        key_end: Text after it.
        value_start: Text before the value, after white space; empty if it follows the name directly.
        value_end: Text after the value.
        call_end: Text after the last argument.
        has_lines: Whether a line break after the opening and before the closing tag is layout.
        optional_end: Whether a missing closing tag is accepted where the next tag begins a line.
    """

    key_start: str
    key_end: str
    value_end: str
    call_end: str
    value_start: str = ""
    has_lines: bool = False
    optional_end: bool = False

    @cached_property
    def value_ends(self) -> tuple[str, ...]:
        """The texts that may end a value."""
        ends = [f"\n{self.value_end}"] if self.has_lines else []
        ends += [f"\n{self.key_start}", f"\n{self.call_end}"] if self.optional_end else []
        return (*ends, self.value_end)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags within a call."""
        return tuple(filter(is_tag, (self.key_start, self.key_end, self.value_start, self.value_end, self.call_end)))

    @cached_property
    def value_pattern(self) -> re.Pattern[str]:
        """Finds the end of a value."""
        return compile_markers(self.value_ends)


_BETWEEN, _KEY_STATE, _BEFORE_VALUE, _LINE, _VALUE = range(5)


class TaggedArgumentsReader:
    """Parser of one call's arguments. See CallReader.

    Args:
        index: Number of the call in the output.
        name: The function's name.
        syntax: The tags.
        types: The types of the arguments.
        make_id: Makes the call's id.
    """

    def __init__(
        self,
        index: int,
        name: str,
        syntax: TagSyntax,
        types: ArgumentTypes,
        make_id: Callable[[], str] = make_call_id,
    ) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self.index = index
        self._name = name
        self._syntax = syntax
        self._types = types
        self._make_id = make_id
        self._state = _BETWEEN
        self._has_arguments = False
        self._type: Types = STRING
        self._strings: frozenset[str] = frozenset()  # values that are strings
        self._value: list[str] = []  # of a value that is converted when it is complete

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        """Parses from `start`, appends deltas to `out`, and returns the index of the first unread character."""
        i = start
        states = (self._between, self._key, self._before_value, self._line, self._read_value)
        while i < len(text) and not (self.done or self.failed):
            before, state = i, self._state
            i = states[state](text, i, out)
            if i == before and state == self._state:
                break  # the rest may begin a tag
        return i

    def finish(self, out: list[Delta], rest: str = "") -> None:
        """Ends the text: emits the arguments so far if the call has started. `rest` is the beginning of a tag."""
        text = "".join(self._value).lstrip()
        if self.started and self._state == _VALUE and text and self._type != STRING:
            self._emit(text if text[0] in OPENING else to_json(text, self._type, self._strings), out)
        self._value = []

    def _between(self, text: str, i: int, out: list[Delta]) -> int:
        found = NOT_SPACE.search(text, i)
        if found is None:
            return len(text)
        i = found.start()
        syntax = self._syntax
        if text.startswith(syntax.key_start, i):
            self._begin(out)
            self._state = _KEY_STATE
            return i + len(syntax.key_start)
        if text.startswith(syntax.call_end, i):
            self._begin(out)
            self._close(out)
            self.done = True
            return i + len(syntax.call_end)
        if self.started and text.startswith(syntax.value_end, i):  # repeated
            return i + len(syntax.value_end)
        if not any(is_partial_marker(text, i, tag) for tag in (syntax.key_start, syntax.call_end, syntax.value_end)):
            self._fail(out)
        return i

    def _key(self, text: str, i: int, out: list[Delta]) -> int:
        end = text.find(self._syntax.key_end, i, i + MAX_KEY)
        if end < 0:
            if len(text) - i >= MAX_KEY:
                self._fail(out)
            return i
        found = _KEY.fullmatch(text, i, end)
        assert found is not None
        key, string = found["key"], found["string"]
        types = self._types.of(key)
        self._type = STRING if string == "true" else types - STRING if string == "false" else types
        self._strings = frozenset() if string == "false" else self._types.strings_of(key)
        self._emit(f"{', ' if self._has_arguments else '{'}{quote(key)}: ", out)
        self._has_arguments = True
        self._state = _BEFORE_VALUE if self._syntax.value_start else _LINE
        return end + len(self._syntax.key_end)

    def _before_value(self, text: str, i: int, out: list[Delta]) -> int:
        found = NOT_SPACE.search(text, i)
        if found is None:
            return len(text)
        i = found.start()
        if text.startswith(self._syntax.value_start, i):
            self._state = _LINE
            return i + len(self._syntax.value_start)
        if text.startswith(self._syntax.key_end, i):  # repeated
            return i + len(self._syntax.key_end)
        if not any(is_partial_marker(text, i, tag) for tag in (self._syntax.value_start, self._syntax.key_end)):
            self._emit("null", out)
            self._fail(out)
        return i

    def _line(self, text: str, i: int, out: list[Delta]) -> int:
        self._state = _VALUE
        if self._type == STRING:
            self._emit('"', out)
        return i + 1 if self._syntax.has_lines and text[i] == "\n" else i

    def _read_value(self, text: str, i: int, out: list[Delta]) -> int:
        syntax = self._syntax
        found = syntax.value_pattern.search(text, i)
        end = found.start() if found else len(text) - partial_marker_length(text, i, syntax.value_ends)
        if self._type == STRING:
            self._emit(escape(text[i:end]), out)
        elif end > i:
            self._value.append(text[i:end])
        if found is None:
            return end
        self._emit('"' if self._type == STRING else to_json("".join(self._value), self._type, self._strings), out)
        self._value = []
        self._state = _BETWEEN
        return found.end() if found.group().endswith(syntax.value_end) else found.start()

    def _begin(self, out: list[Delta]) -> None:
        if not self.started:
            self.started = True
            out.append(ToolCallDelta(self.index, self._make_id(), self._name))

    def _close(self, out: list[Delta]) -> None:
        self._emit("}" if self._has_arguments else "{}", out)

    def _fail(self, out: list[Delta]) -> None:
        """Ends the call with the arguments so far."""
        if self.started:
            self._close(out)
        self.failed = True

    def _emit(self, text: str, out: list[Delta]) -> None:
        if text:
            out.append(ToolCallDelta(self.index, arguments=text))


class TaggedCalls(HeaderCalls):
    """Incremental parser of calls with tagged arguments.

    Args:
        tools: The request's tools.
        syntax: The tags of the arguments.
        start, separators, section, keep_separator: As for HeaderCalls.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        syntax: TagSyntax,
        start: str,
        separators: tuple[str, ...] = (">",),
        *,
        section: tuple[str, str] | None = None,
        keep_separator: bool = False,
    ) -> None:
        super().__init__(start, separators, section=section, closers=syntax.tags, keep_separator=keep_separator)
        self._tools = tools
        self._syntax = syntax

    def make_reader(self, header: str) -> CallReader | None:
        name = function_name(header)
        if name is None:
            return None
        return TaggedArgumentsReader(
            self.num_calls, name, self._syntax, ArgumentTypes(self._tools, name), self._make_id
        )
