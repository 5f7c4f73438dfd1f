"""Tool call format of DeepSeek-V3 and R1: the word `function`, the name, and JSON in a code block.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.header_calls import function_name
from mvllm_parsers.named_json_calls import NamedJsonCalls
from mvllm_parsers.tools.deepseek_v31 import END, SECTION, SEPARATOR, START


class DeepSeekV3ToolParser(ToolParser):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and a code block."""

    markers = (*SECTION, START, SEPARATOR, END)

    def stream(self) -> ToolStream:
        ends = (f"```{END}", END)
        return NamedJsonCalls(
            START, ("{",), ends, _parse_header, section=SECTION, closers=(SEPARATOR,), keep_separator=True
        )

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        begin = f"{START}function{SEPARATOR}{name}\n```json\n"
        return (CallSyntax(START, begin, f"\n```{END}", special_tokens=SECTION),)


def _parse_header(header: str) -> tuple[str | None, None]:
    _, separator, rest = header.partition(SEPARATOR)
    return (function_name(rest.partition("```")[0]) if separator else None), None
