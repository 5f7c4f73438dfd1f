"""Tool calls of gpt-oss: messages in the harmony format with a function as their recipient.

    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
     to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>

The text of all other messages is content, without their headers. The reasoning parser `gpt_oss` separates the
reasoning before, and passes on the messages that call functions unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mvllm.extension_api.parsers import (
    NOT_SPACE,
    CallReader,
    CallSyntax,
    ContentDelta,
    Delta,
    ToolCallDelta,
    ToolCallReader,
    ToolParser,
    ToolStream,
    make_call_id,
    merge_adjacent,
)
from mvllm_parsers.argument_types import ArgumentTypes, escape, quote
from mvllm_parsers.harmony import (
    CHANNEL,
    CONSTRAIN,
    FUNCTIONS,
    MARKERS,
    MESSAGE,
    Closed,
    HarmonyScanner,
    Opened,
    Outside,
    Text,
)


class GptOssToolParser(ToolParser):
    """Messages in the harmony format."""

    markers = MARKERS

    def stream(self) -> ToolStream:
        return _Stream(self.tools)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        trigger = f" to={FUNCTIONS}"
        # The recipient stands in the channel, or before it, as the chat template renders earlier calls.
        headers = (f" {CONSTRAIN}json{MESSAGE}", f"{CHANNEL}commentary json{MESSAGE}")
        return tuple(CallSyntax(trigger, trigger + name + header, "", special_tokens=MARKERS) for header in headers)


class _Stream(ToolStream):
    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools
        self._scanner = HarmonyScanner()
        self._reader: CallReader | None = None
        self._function = ""
        self._in_call = False

    def feed(self, text: str) -> list[Delta]:
        return self._read(self._scanner.feed(text))

    def finish(self) -> list[Delta]:
        return self._read(self._scanner.finish())

    def _read(self, events: list[Opened | Text | Closed | Outside]) -> list[Delta]:
        out: list[Delta] = []
        for event in events:
            match event:
                case Opened(header):
                    self._in_call = header.function is not None
                    self._function = header.function or ""
                case Text(text) if self._in_call:
                    self._read_arguments(text, out)
                case Text(text) | Outside(text):
                    out.append(ContentDelta(text))
                case Closed() if self._in_call:
                    self._end_call(out)
        return merge_adjacent(out)

    def _read_arguments(self, text: str, out: list[Delta]) -> None:
        if self._reader is None:
            found = NOT_SPACE.search(text)
            if found is None:
                return
            self._reader = ToolCallReader(self.num_calls, self._function)
            if found.group() != "{":
                key = ArgumentTypes(self._tools, self._function).only_key or "input"
                self._reader = _PlainTextReader(self.num_calls, self._function, key)
            self.num_calls += 1
            text = text[found.start() :]
        end = 0 if self._reader.done or self._reader.failed else self._reader.feed(text, 0, out)
        if self._reader.failed and end < len(text):  # text after complete arguments is layout
            out.append(ContentDelta(text[end:]))

    def _end_call(self, out: list[Delta]) -> None:
        if self._reader is None:
            out.append(ToolCallDelta(self.num_calls, make_call_id(), self._function))  # without arguments
            self.num_calls += 1
        elif not (self._reader.done or self._reader.failed):
            self._reader.finish(out)
        self._reader, self._in_call = None, False


class _PlainTextReader:
    """Reader of arguments that are not a JSON object, like the code of `to=python`: they become the member `key`."""

    def __init__(self, index: int, name: str, key: str) -> None:
        self.index = index
        self.started = self.done = self.failed = False
        self._name = name
        self._key = key

    def feed(self, text: str, start: int, out: list[Delta]) -> int:
        if not self.started:
            self.started = True
            out.append(ToolCallDelta(self.index, make_call_id(), self._name))
            out.append(ToolCallDelta(self.index, arguments=f'{{{quote(self._key)}: "'))
        if text[start:]:
            out.append(ToolCallDelta(self.index, arguments=escape(text[start:])))
        return len(text)

    def finish(self, out: list[Delta], rest: str = "") -> None:
        """Nothing is held back. The object is closed by whoever checks the arguments."""
