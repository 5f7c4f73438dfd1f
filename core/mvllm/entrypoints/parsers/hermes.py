"""Tool call format of Hermes 2 Pro, Qwen2.5 and Qwen3.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Each of several calls has its own markers. A list or several objects between one pair of markers are accepted, too.
"""

from __future__ import annotations

from mvllm.entrypoints.parsers.interface import CallSyntax, ToolParser, ToolStream
from mvllm.entrypoints.parsers.marked_calls import MarkedCalls

START, END = "<tool_call>", "</tool_call>"


class HermesToolParser(ToolParser):
    """`<tool_call>{...}</tool_call>`."""

    markers = (START, END)

    def stream(self) -> ToolStream:
        return MarkedCalls(START, END)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return (CallSyntax(START, f'{START}\n{{"name": "{name}", "arguments": ', f"}}\n{END}"),)
