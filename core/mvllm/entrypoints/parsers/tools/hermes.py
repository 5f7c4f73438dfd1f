"""Calls as Hermes 2 Pro, Qwen2.5 and Qwen3 write them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Parallel calls have markers of their own each; a list, or several objects, between one pair of markers are read as well.
"""

from __future__ import annotations

from mvllm.entrypoints.parsers.interface import ToolParser, ToolStream
from mvllm.entrypoints.parsers.marked_calls import MarkedCalls

START, END = "<tool_call>", "</tool_call>"


class HermesToolParser(ToolParser):
    """`<tool_call>{...}</tool_call>`."""

    markers = (START, END)

    def stream(self) -> ToolStream:
        return MarkedCalls(START, END)
