"""Tool call format of Granite 3: a JSON list after a marker. Granite 4 writes the format of `hermes`.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]     3.0, 3.2 and 3.3
<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]       3.1
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, MarkedCalls, ToolParser, ToolStream

TOKEN, TAG, END = "<|tool_call|>", "<tool_call>", "</tool_call>"


class GraniteToolParser(ToolParser):
    """`<|tool_call|>[{...}]`."""

    markers = (TOKEN, TAG, END)

    def stream(self) -> ToolStream:
        return MarkedCalls((TOKEN, TAG), END)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return tuple(CallSyntax(start, f'{start}[{{"name": "{name}", "arguments": ', "}]") for start in (TOKEN, TAG))
