"""Tool call format of Llama 4: a Python list of calls, optionally between special tokens.

<|python_start|>[get_weather(city="Paris", days=3), get_time()]<|python_end|>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.pythonic_calls import PythonicCalls

START, END = "<|python_start|>", "<|python_end|>"


class Llama4PythonicToolParser(ToolParser):
    """`[name(key=value)]`, or the same between markers."""

    markers = (START, END)

    def stream(self) -> ToolStream:
        return PythonicCalls(START, END)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return (CallSyntax(f"{name}(", f"{name}(", ")", "python", special_tokens=self.markers),)
