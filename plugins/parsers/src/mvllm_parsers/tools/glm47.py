"""Tool call format of GLM-4.5, 4.6 and 4.7: keys and values in tags. The older models write each on a line of its own.

<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.tagged_arguments import TaggedCalls, TagSyntax

START, END = "<tool_call>", "</tool_call>"
SYNTAX = TagSyntax("<arg_key>", "</arg_key>", "</arg_value>", END, value_start="<arg_value>")


class Glm47ToolParser(ToolParser):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    markers = (START, END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def stream(self) -> ToolStream:
        return TaggedCalls(self.tools, SYNTAX, START, (SYNTAX.key_start, END), keep_separator=True)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        styles = {"": "glm_compact_xml", "\n": "glm_xml"}
        return tuple(CallSyntax(START, f"{START}{name}{line}", END, style) for line, style in styles.items())
