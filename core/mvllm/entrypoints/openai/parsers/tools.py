"""The ways in which families of models write calls of tools."""

from __future__ import annotations

import json
from typing import Any

from mvllm.entrypoints.openai.parsers.interface import MarkFinder, Parser, Part, Text, ToolCall

_decoder = json.JSONDecoder()


class HermesParser(Parser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call (Hermes, Qwen)."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._open = MarkFinder(self._OPEN)
        self._close: MarkFinder | None = None  # set within a call
        self._call: list[str] = []
        self._space = ""  # white space that stands between calls, or at the end

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest: str | None = text
        while rest is not None:
            if self._close is None:
                before, rest = self._open.feed(rest)
                parts += self._text(before, at_mark=rest is not None)
                if rest is not None:
                    self._close = MarkFinder(self._CLOSE)
            else:
                inside, rest = self._close.feed(rest)
                self._call.append(inside)
                if rest is not None:
                    parts += self._end_call(closed=True)
        return parts

    def finish(self) -> list[Part]:
        if self._close is not None:
            self._call.append(self._close.finish())
            return self._end_call(closed=False)
        held = self._space + self._open.finish()
        return [Text(held)] if held else []

    def _text(self, text: str, *, at_mark: bool) -> list[Part]:
        text = self._space + text
        shown = text.rstrip()
        self._space = "" if at_mark else text[len(shown) :]
        return [Text(shown)] if shown else []

    def _end_call(self, *, closed: bool) -> list[Part]:
        written, self._call, self._close = "".join(self._call), [], None
        call = _as_call(_parse(written.strip()))
        if call is not None:
            return [call]
        return [Text(self._OPEN + written + (self._CLOSE if closed else ""))]


class Llama3JsonParser(Parser):
    """The answer is one or several `{"name": ..., "parameters": {...}}`, with `;` between them (Llama 3.1 and 3.2)."""

    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._start = ""
        self._written: list[str] | None = None  # set where the answer is a call
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        if self._is_text:
            return [Text(text)] if text else []
        if self._written is not None:
            self._written.append(text)
            return []
        self._start += text
        start = self._start.lstrip()
        if not start or (self._TAG.startswith(start) and start != self._TAG):
            return []
        if start.startswith((self._TAG, "{")):
            self._written = [self._start]
            return []
        self._is_text = True
        return [Text(self._start)]

    def finish(self) -> list[Part]:
        if self._is_text:
            return []
        if self._written is None:
            return [Text(self._start)] if self._start else []
        written = "".join(self._written)
        calls = self._calls(written.strip().removeprefix(self._TAG))
        return list(calls) if calls else [Text(written)]

    @staticmethod
    def _calls(written: str) -> list[ToolCall] | None:
        calls = []
        at = 0
        while at < len(written):
            if written[at] in " \t\r\n;":
                at += 1
                continue
            value, at = _parse_at(written, at)
            call = _as_call(value)
            if call is None:
                return None
            calls.append(call)
        return calls


class MistralParser(Parser):
    """`[TOOL_CALLS]` before a list of calls, or before each `name{...}` (Mistral)."""

    needs_special_tokens = True
    _MARK = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self._mark = MarkFinder(self._MARK)
        self._written: list[str] | None = None  # set once calls have begun

    def feed(self, text: str) -> list[Part]:
        if self._written is not None:
            self._written.append(text)
            return []
        before, after = self._mark.feed(text)
        if after is not None:
            self._written = [after]
        return [Text(before)] if before else []

    def finish(self) -> list[Part]:
        if self._written is None:
            held = self._mark.finish()
            return [Text(held)] if held else []
        written = "".join(self._written)
        calls: list[Part] = []
        for piece in written.split(self._MARK):
            found = self._calls(piece.strip())
            if found is None:
                return [Text(self._MARK + written)]
            calls += found
        return calls

    @staticmethod
    def _calls(piece: str) -> list[ToolCall] | None:
        if piece.startswith("["):
            value, _ = _parse_at(piece, 0)
            calls = [_as_call(each) for each in value] if isinstance(value, list) else [None]
            return None if None in calls else [call for call in calls if call is not None]
        name, brace, _ = piece.partition("{")
        name = name.partition("[CALL_ID]")[0].partition("[ARGS]")[0].strip()
        value, _ = _parse_at(piece, len(piece.partition("{")[0])) if brace else (None, 0)
        call = _as_call({"name": name, "arguments": value}) if name and isinstance(value, dict) else None
        return None if call is None else [call]


def _as_call(value: Any) -> ToolCall | None:
    """A call as models write it, or None where it is something else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # written as the API has them
        arguments = _parse(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _parse(text: str) -> Any:
    value, end = _parse_at(text, 0)
    return value if end == len(text) else None


def _parse_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, and where it ends; None and the text's end where there is none."""
    try:
        return _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, len(text) + 1
