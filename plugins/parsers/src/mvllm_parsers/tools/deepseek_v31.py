"""Tool call format of DeepSeek-V3.1: the function's name, a separator, and a JSON object, between special tokens.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.header_calls import function_name
from mvllm_parsers.named_json_calls import NamedJsonCalls

SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
START, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV31ToolParser(ToolParser):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

    markers = (*SECTION, START, SEPARATOR, END)

    def stream(self) -> ToolStream:
        return NamedJsonCalls(
            START, (SEPARATOR,), (END,), lambda header: (function_name(header), None), section=SECTION
        )

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return (CallSyntax(START, f"{START}{name}{SEPARATOR}", END, special_tokens=SECTION),)
