"""Tool call format of Llama 3.2 and others: a Python list of calls.

[get_weather(city="Paris", days=3), get_time()]
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.pythonic_calls import PythonicCalls


class PythonicToolParser(ToolParser):
    """`[name(key=value)]`."""

    def stream(self) -> ToolStream:
        return PythonicCalls()

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return (CallSyntax(f"{name}(", f"{name}(", ")", "python"),)
