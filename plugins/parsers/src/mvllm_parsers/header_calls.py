"""Incremental parser of calls that begin with a marker and the function's name, alone or in a section.

    text      <section>  <call> get_weather <separator>  ...arguments...  <end>  <call> ...  </section>
    reads as  opening    header                          call             after

The base of DeepSeek's, Kimi's, Gemma's and all XML formats. The section's markers are optional, so that a call is found
without them. A header that is no name, and a section without a call, are content.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable

from mvllm.extension_api.parsers import (
    NOT_SPACE,
    CallReader,
    Delta,
    MarkedCalls,
    compile_markers,
    is_partial_marker,
    make_call_id,
    partial_marker_length,
)

MAX_HEADER = 256
"""Characters of a header; a longer one is content."""

FUNCTION_NAME = re.compile(r"[\w.:/\-]{1,128}")


class HeaderCalls(MarkedCalls):
    """Incremental parser of calls with a header. Subclasses make the reader of the arguments.

    Args:
        start: Marker before each call.
        separators: Texts that end the header, of which the first one found counts.
        ends: Markers after a call, of which one may stand there. Empty if the reader consumes the end.
        closers: Further markers of the format that no call begins with.
        section: Markers around all calls; None if there are none.
        keep_separator: Whether the separator belongs to the arguments.
        make_id: Makes the calls' ids.
    """

    def __init__(
        self,
        start: str,
        separators: tuple[str, ...],
        ends: tuple[str, ...] = (),
        *,
        section: tuple[str, str] | None = None,
        closers: tuple[str, ...] = (),
        keep_separator: bool = False,
        make_id: Callable[[], str] = make_call_id,
    ) -> None:
        section_start, section_end = section or ("", "")
        closers = (*ends, section_end, *closers, *(one for one in separators if one not in (start, section_start)))
        super().__init__(start, closers=closers, bare=False, make_id=make_id)
        self._ends = ends
        self._section = section
        self._markers = tuple(marker for marker in (*self._markers, section_start) if marker)
        self._pattern = compile_markers(self._markers)
        self._separators = separators
        self._header_markers = (*separators, *ends[-1:], start, *(section or ()))
        self._header_pattern = compile_markers(self._header_markers)
        self._keep_separator = keep_separator
        self._header: list[str] = []
        self._header_length = 0
        self._in_section = False

    @abstractmethod
    def make_reader(self, header: str) -> CallReader | None:
        """The reader of a call's arguments, from the text between the start marker and the separator.

        None if the header is not that of a call.
        """

    def content(self, text: str, i: int, out: list[Delta]) -> int:
        """State outside of calls."""
        found = self._pattern.search(text, i)
        if found is None:
            end = len(text) - partial_marker_length(text, i, self._markers)
            self.say(text[i:end], out)
            return self.wait(text, end)
        self.say(text[i : found.start()], out)
        marker = found.group()
        if marker in self._starts:
            self._open_header(marker)
        elif self._section is not None and marker == self._section[0]:
            self.open(marker)
        else:
            if self._section is not None and marker == self._section[1]:
                self._in_section = False
            self.drop_closer(marker, out)
        return found.end()

    def opening(self, text: str, i: int, out: list[Delta]) -> int:
        """State after the section's start marker: a call should follow."""
        found = NOT_SPACE.search(text, i)
        if found is None:
            return self.hold(text, i, len(text))
        i = self.hold(text, i, found.start())
        [start] = self._starts
        if is_partial_marker(text, i, start):
            return self.wait(text, i)
        if not text.startswith(start, i):
            end = self.skip_empty(text, i)
            return self.give_up(i, out) if end is None else end
        self._in_section = True
        self._open_header(*self._held, start)
        return i + len(start)

    def after(self, text: str, i: int, out: list[Delta]) -> int:
        """State after the arguments: the end marker, another call, the section's end, or content follows."""
        found = NOT_SPACE.search(text, i)
        if found is None:
            self._space_after_call.append(text[i:])
            return len(text)
        self._space_after_call.append(text[i : found.start()])
        i = found.start()
        ends = self._ends if self._unclosed else ()
        follow = (*self._starts, self._section[1]) if self._section is not None and self._in_section else ()
        for marker in (*ends, *follow):
            if is_partial_marker(text, i, marker):
                return self.wait(text, i)
        space, self._space_after_call = "".join(self._space_after_call), []
        for marker in (*ends, *follow):
            if text.startswith(marker, i):
                break
        else:
            self._space.append(space)
            self.state = self.content
            return i
        self._unclosed = False
        if marker in self._starts:
            self._open_header(marker)
        elif marker not in ends or not self._in_section:
            self._in_section &= marker in ends
            self.state = self.content
        return i + len(marker)

    def give_up(self, i: int, out: list[Delta]) -> int:
        """Emits the stored text as content; parsing continues at `i`."""
        if not self.num_calls:
            self._in_section = False
        return super().give_up(i, out)

    def may_be_call(self) -> bool:
        return self.state != self._read_header or len("".join(self._header).split()) <= 2

    def _open_header(self, *markers: str) -> None:
        self._held = list(markers)
        self._header, self._header_length = [], 0
        self.state = self._read_header

    def _read_header(self, text: str, i: int, out: list[Delta]) -> int:
        found = self._header_pattern.search(text, i)
        end = found.start() if found else len(text) - partial_marker_length(text, i, self._header_markers)
        room = MAX_HEADER - self._header_length
        if end - i > room:
            return self.give_up(self.hold(text, i, i + room), out)
        self._header.append(text[i:end])
        self._header_length += end - i
        self.hold(text, i, end)
        if found is None:
            return self.wait(text, end)
        separator = found.group()
        if separator in self._markers and not "".join(self._header).strip():
            skipped = self.skip_empty(text, end)
            assert skipped is not None
            return skipped
        reader = self.make_reader("".join(self._header)) if separator in self._separators else None
        if reader is None:
            if (dropped := self.drop_unfinished(text, end)) is not None:
                return dropped
            if separator in self._separators and separator not in self._markers:
                end = self.hold(text, end, found.end())
            return self.give_up(end, out)
        self.read_with(reader)
        return end if self._keep_separator else self.hold(text, end, found.end())

    @property
    def _all_markers(self) -> tuple[str, ...]:
        return (*self._ends, *self._markers)

    @property
    def _openers(self) -> tuple[str, ...]:
        return (*self._starts, *(self._section or ())[:1])


def function_name(text: str) -> str | None:
    """The function's name in a header, without white space and quotes around it; None if it is none."""
    name = text.strip().strip("\"'")
    return name if FUNCTION_NAME.fullmatch(name) else None
