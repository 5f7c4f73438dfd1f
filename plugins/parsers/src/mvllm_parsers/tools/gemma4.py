"""Tool call format of Gemma 4: the function's name and an object with bare keys.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import ToolParser, ToolStream
from mvllm_parsers.gemma_calls import GemmaCalls

START, END, QUOTES = "<|tool_call>", "<tool_call|>", '<|"|>'


class Gemma4ToolParser(ToolParser):
    """`<|tool_call>call:name{key:value}<tool_call|>`."""

    markers = (START, END, QUOTES)

    def stream(self) -> ToolStream:
        return GemmaCalls(START, END, QUOTES)
