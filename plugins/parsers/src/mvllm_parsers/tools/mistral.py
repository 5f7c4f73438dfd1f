"""Tool call format of Mistral's models, after the special token `[TOOL_CALLS]`.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]      tokenizers up to version 7
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}  later ones

In the second form `[CALL_ID]...` may follow the name, and `[ARGS]` may be missing. Mistral's chat templates accept only
call ids of nine letters and digits, so calls get such ids.
"""

from __future__ import annotations

import random
import re
import string

from mvllm.extension_api.parsers import (
    NOT_SPACE,
    CallSyntax,
    Delta,
    MarkedCalls,
    ToolParser,
    ToolStream,
    is_partial_marker,
)

START, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME = re.compile(r"[\w.:/\-]+")
_ID = re.compile(r"[\w\-]*")
_LETTERS = string.ascii_letters + string.digits
_random = random.SystemRandom()


class MistralToolParser(ToolParser):
    """`[TOOL_CALLS]...`."""

    markers = (START, ARGUMENTS, CALL_ID)

    def stream(self) -> ToolStream:
        return _Stream()

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        older = CallSyntax(START, f'{START} [{{"name": "{name}", "arguments": ', "}]")
        return CallSyntax(START, f"{START}{name}{ARGUMENTS}", ""), older


class _Stream(MarkedCalls):
    def __init__(self) -> None:
        super().__init__(START, closers=(ARGUMENTS, CALL_ID), bare=False, make_id=make_short_id)
        self._name: list[str] = []

    def opening(self, text: str, i: int, out: list[Delta]) -> int:
        found = NOT_SPACE.search(text, i)
        if found is None:
            return self.hold(text, i, len(text))
        at, c = found.start(), found.group()
        if c == "[" and at + 1 == len(text):
            self.hold(text, i, at)
            return self.wait(text, at)  # a list, or another marker?
        if c == "[" and text[at + 1] == START[1]:
            self.hold(text, i, at)
            return self.give_up(at, out)
        if self._in_list or not _NAME.match(c):
            return super().opening(text, i, out)
        self._name = []
        self.state = self._read_name
        return self.hold(text, i, at)

    def _read_name(self, text: str, i: int, out: list[Delta]) -> int:
        found = _NAME.match(text, i)
        if found is not None:
            self._name.append(found.group())
            return self.hold(text, i, found.end())
        self.state = self._after_name
        return i

    def _after_name(self, text: str, i: int, out: list[Delta]) -> int:
        found = NOT_SPACE.search(text, i)
        if found is None:
            return self.hold(text, i, len(text))
        self.hold(text, i, found.start())
        i, c = found.start(), found.group()
        if c == "{":
            self.read_arguments("".join(self._name))
            return i
        if text.startswith(ARGUMENTS, i):
            self.read_arguments("".join(self._name))
            return self.hold(text, i, i + len(ARGUMENTS))
        if text.startswith(CALL_ID, i):
            self.state = self._read_id
            return self.hold(text, i, i + len(CALL_ID))
        if is_partial_marker(text, i, ARGUMENTS) or is_partial_marker(text, i, CALL_ID):
            return self.wait(text, i)
        return self.give_up(i, out)

    def _read_id(self, text: str, i: int, out: list[Delta]) -> int:
        found = _ID.match(text, i)
        end = found.end() if found else i
        if end < len(text):
            self.state = self._after_name
        return self.hold(text, i, end)


def make_short_id() -> str:
    """A new id for a tool call: nine letters and digits."""
    return "".join(_random.choices(_LETTERS, k=9))
