"""Tool call format of Kimi K2: an id that contains the function's name, and a JSON object, between special tokens.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>

The model counts its calls, and its chat template expects these ids again; so they are the calls' ids.
"""

from __future__ import annotations

import re

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.named_json_calls import NamedJsonCalls

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
START, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.\-/]{1,128}?)(?P<number>:\d{1,9})?")


class KimiK2ToolParser(ToolParser):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

    markers = (*SECTION, START, ARGUMENTS, END)

    def stream(self) -> ToolStream:
        return NamedJsonCalls(START, (ARGUMENTS,), (END,), _parse_header, section=SECTION)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        begin = f"{START}functions.{name}:"
        return (CallSyntax(START, begin, END, "numbered_json", ARGUMENTS, SECTION),)


def _parse_header(header: str) -> tuple[str | None, str | None]:
    call_id = header.strip()
    found = _ID.fullmatch(call_id)
    if found is None:
        return None, None
    return found["name"], call_id if found["number"] else None
