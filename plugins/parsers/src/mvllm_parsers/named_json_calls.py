"""Incremental parser of calls that have the function's name in a header and the arguments as a JSON object."""

from __future__ import annotations

from collections.abc import Callable

from mvllm.extension_api.parsers import CallReader, ToolCallReader, make_call_id
from mvllm_parsers.header_calls import HeaderCalls


class NamedJsonCalls(HeaderCalls):
    """Incremental parser of calls with JSON arguments.

    Args:
        start, separators, ends, section, closers, keep_separator: As for HeaderCalls.
        parse_header: The function's name and the call's id in a header: None for the name if it is none, and for the
            id if the header has none.
    """

    def __init__(
        self,
        start: str,
        separators: tuple[str, ...],
        ends: tuple[str, ...],
        parse_header: Callable[[str], tuple[str | None, str | None]],
        *,
        section: tuple[str, str] | None = None,
        closers: tuple[str, ...] = (),
        keep_separator: bool = False,
    ) -> None:
        super().__init__(start, separators, ends, section=section, closers=closers, keep_separator=keep_separator)
        self._parse_header = parse_header
        self._ids: set[str] = set()

    def make_reader(self, header: str) -> CallReader | None:
        name, call_id = self._parse_header(header)
        if name is None:
            return None
        if call_id is None or call_id in self._ids:  # ids must be unique
            call_id = make_call_id()
        self._ids.add(call_id)
        return ToolCallReader(self.num_calls, name, make_id=lambda: call_id)
