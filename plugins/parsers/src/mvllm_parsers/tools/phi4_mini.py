"""Tool call format of Phi-4-mini: a JSON list after a marker.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>     the model's own template
functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]                       templates with instructions
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, MarkedCalls, ToolParser, ToolStream

TOKEN, WORD, END = "<|tool_call|>", "functools", "<|/tool_call|>"


class Phi4MiniToolParser(ToolParser):
    """`functools[{...}]`."""

    markers = (TOKEN, WORD, END)

    def stream(self) -> ToolStream:
        return MarkedCalls((TOKEN, WORD), END, bare=False)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        ends = {TOKEN: f"}}]{END}", WORD: "}]"}
        return tuple(
            CallSyntax(start, f'{start}[{{"name": "{name}", "arguments": ', end) for start, end in ends.items()
        )
