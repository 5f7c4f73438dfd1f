"""Tool call format of FunctionGemma: the function's name and an object with bare keys.

<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import ToolParser, ToolStream
from mvllm_parsers.gemma_calls import GemmaCalls

START, END, QUOTES = "<start_function_call>", "<end_function_call>", "<escape>"


class FunctionGemmaToolParser(ToolParser):
    """`<start_function_call>call:name{key:value}<end_function_call>`."""

    markers = (START, END, QUOTES)

    def stream(self) -> ToolStream:
        return GemmaCalls(START, END, QUOTES)
