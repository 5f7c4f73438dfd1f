"""Tool call format of Gemma 4: the function's name and an object with bare keys.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

from mvllm.entrypoints.parsers.gemma_calls import GemmaCalls
from mvllm.entrypoints.parsers.interface import ToolParser, ToolStream

START, END, QUOTES = "<|tool_call>", "<tool_call|>", '<|"|>'


class Gemma4ToolParser(ToolParser):
    """`<|tool_call>call:name{key:value}<tool_call|>`."""

    markers = (START, END, QUOTES)

    def stream(self) -> ToolStream:
        return GemmaCalls(START, END, QUOTES)
