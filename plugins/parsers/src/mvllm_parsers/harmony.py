"""Splits text in the harmony format (gpt-oss) into messages: the common part of its reasoning and tool call parsers.

    <|channel|>analysis<|message|>I should look.<|end|>                                   reasoning
    <|start|>assistant<|channel|>commentary<|message|>I look.<|end|>                      content before a call
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    <|start|>assistant<|channel|>final<|message|>It rains.<|return|>                      content

The prompt ends with `<|start|>assistant`, so an output begins inside a header. The recipient may also stand before the
channel: ` to=functions.f<|channel|>commentary json<|message|>`. The last marker is mostly a stop token and missing.

The scanner consumes each character once and keeps at most a header, whose length is limited. Text outside of messages
is returned without markers, and so is a header that is too long; one that another marker or the end of the text cuts
off is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mvllm.extension_api.parsers import compile_markers, is_partial_marker, partial_marker_length

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"

MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
"""The format's special tokens."""

FUNCTIONS = "functions."
"""Namespace of the request's tools in recipients."""

MAX_HEADER = 512
"""Characters of a header; a longer one is text."""

_OPENERS = (START, CHANNEL)
_CLOSERS = (END, RETURN, CALL)
_MARKER = compile_markers(MARKERS)
_IN_HEADER = compile_markers((START, MESSAGE, *_CLOSERS))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ROLE = "assistant"
_NOBODY = frozenset({"assistant", "user", "all"})  # recipients that are no tools


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message.

    Attributes:
        text: The header with its markers, so that it can be parsed again.
        channel: `analysis`, `commentary`, `final`, or another text; empty if there is none.
        recipient: The tool that the message calls; None if it calls none.
    """

    text: str
    channel: str
    recipient: str | None

    @property
    def is_reasoning(self) -> bool:
        """Whether the message's text is reasoning."""
        return self.channel == "analysis" and self.recipient is None

    @property
    def function(self) -> str | None:
        """The name of the called function, without the namespace of functions; None if the message is no call."""
        return None if self.recipient is None else self.recipient.removeprefix(FUNCTIONS)


@dataclass(frozen=True, slots=True)
class Opened:
    """A message begins."""

    header: Header


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the current message's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The current message ends; `marker` is empty if its end marker is missing."""

    marker: str


@dataclass(frozen=True, slots=True)
class Outside:
    """Text outside of messages."""

    text: str


Event = Opened | Text | Closed | Outside


class HarmonyScanner:
    """Incremental scanner of one output.

    Args:
        prompt: The prompt, or its end, if known: a message that it opens continues in the output.

    Attributes:
        message: The header of the current message; None outside of messages and in headers.
    """

    def __init__(self, prompt: str | None = None) -> None:
        self.message: Header | None = None
        self._tail = ""  # the end of the last piece, if it may begin a marker
        self._header: str | None = None  # the header so far
        self._at_start = True  # nothing but a recipient may stand before the first marker
        if prompt is not None:
            self._continue(prompt)

    def feed(self, text: str) -> list[Event]:
        """Parses the next piece of text."""
        text = self._tail + text
        self._tail = ""
        out: list[Event] = []
        i = 0
        while i < len(text):
            if self.message is not None:
                i = self._read_body(text, i, out)
            elif self._header is not None:
                i = self._read_header(text, i, out)
            else:
                i = self._read_outside(text, i, out)
        return out

    def finish(self) -> list[Event]:
        """Ends the text: returns what was held back. An open message is closed."""
        out: list[Event] = []
        rest, self._tail = self._tail, ""
        if self.message is not None:
            if rest:
                out.append(Text(rest))
            out.append(Closed(""))
            self.message = None
        elif not self._header and rest:
            out.append(Outside(rest))
        self._header = None
        return out

    def _continue(self, prompt: str) -> None:
        """Parses the last message of the prompt, which the output continues."""
        if (at := prompt.rfind(START)) >= 0:
            self.feed(prompt[at:])
            if self._header == START + _ROLE:
                self._header = None  # the output may begin with any text
            self._at_start = self.message is None

    def _read_outside(self, text: str, i: int, out: list[Event]) -> int:
        if self._at_start:
            begins = " to=" if text[i] == " " else "to="
            if is_partial_marker(text, i, begins):
                return self._wait(text, i)
            self._at_start = False
            if text.startswith(begins, i):
                self._header = ""
                return i
        found = _MARKER.search(text, i)
        end = found.start() if found else len(text) - partial_marker_length(text, i, MARKERS)
        if end > i:
            out.append(Outside(text[i:end]))
        if found is None:
            return self._wait(text, end)
        if found.group() in _OPENERS:
            self._header = found.group()
        return found.end()

    def _read_header(self, text: str, i: int, out: list[Event]) -> int:
        assert self._header is not None
        found = _IN_HEADER.search(text, i)
        end = found.start() if found else len(text) - partial_marker_length(text, i, (START, MESSAGE, *_CLOSERS))
        room = MAX_HEADER - len(self._header)
        is_header = end - i <= room
        end = min(end, i + room)
        self._header += text[i:end]
        if not is_header or (found is not None and found.group() != MESSAGE):
            if not is_header and (rest := _MARKER.sub("", self._header)):
                out.append(Outside(rest))
            self._header = None
            return end
        if found is None:
            return self._wait(text, end)
        self.message = _parse_header(self._header + MESSAGE)
        self._header = None
        out.append(Opened(self.message))
        return found.end()

    def _read_body(self, text: str, i: int, out: list[Event]) -> int:
        found = _MARKER.search(text, i)
        end = found.start() if found else len(text) - partial_marker_length(text, i, MARKERS)
        if end > i:
            out.append(Text(text[i:end]))
        if found is None:
            return self._wait(text, end)
        marker = found.group()
        if marker in (MESSAGE, CONSTRAIN):  # of a header that is none
            return found.end()
        self.message = None
        if marker in _CLOSERS:
            out.append(Closed(marker))
        else:
            out.append(Closed(""))
            self._header = marker
        return found.end()

    def _wait(self, text: str, i: int) -> int:
        """Keeps the text from `i` for the next piece; it is shorter than a marker."""
        self._tail = text[i:]
        return len(text)


def _parse_header(text: str) -> Header:
    if not text.startswith(_OPENERS):
        text = f"{START}{_ROLE}{text}"
    found = _RECIPIENT.search(text)
    recipient = found.group(1) if found and found.group(1) not in _NOBODY else None
    _, _, after = text.partition(CHANNEL)
    words = after.partition("<")[0].split()
    return Header(text, words[0] if words and not words[0].startswith("to=") else "", recipient)
