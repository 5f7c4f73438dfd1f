"""Tool call format of DeepSeek-V3.2 (DSML): XML-like tags that say whether a value is a string or JSON.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.tagged_arguments import TaggedCalls, TagSyntax

SECTION = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
START = "<｜DSML｜invoke name="
SYNTAX = TagSyntax("<｜DSML｜parameter name=", ">", "</｜DSML｜parameter>", "</｜DSML｜invoke>")


class DeepSeekV32ToolParser(ToolParser):
    """`<｜DSML｜invoke name="name">` with `<｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>`."""

    markers = (*SECTION, "｜DSML｜")

    def stream(self) -> ToolStream:
        return TaggedCalls(self.tools, SYNTAX, START, section=SECTION)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return (CallSyntax(START, f'{START}"{name}">\n', SYNTAX.call_end, "deepseek_xml", special_tokens=self.markers),)
