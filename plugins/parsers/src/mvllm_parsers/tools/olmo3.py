"""Tool call format of OLMo 3: calls in Python's syntax, one a line, between tags. Literals may have JSON's spelling.

<function_calls>
get_weather(city="Paris", days=3)
get_time()
</function_calls>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.pythonic_calls import PythonicCalls

START, END = "<function_calls>", "</function_calls>"


class Olmo3ToolParser(ToolParser):
    """`<function_calls>name(key=value)</function_calls>`."""

    markers = (START, END)

    def stream(self) -> ToolStream:
        return PythonicCalls(START, END, bare_lists=False)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return (CallSyntax(f"{name}(", f"{name}(", ")", "python", special_tokens=self.markers),)
