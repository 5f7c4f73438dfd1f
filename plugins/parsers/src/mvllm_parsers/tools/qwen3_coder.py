"""Tool call format of Qwen3-Coder, Qwen3.5 and other models that write arguments as XML-like tags.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The outer tags may be missing. Values have no escapes; the schema of the function says which are strings.
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.tagged_arguments import TaggedCalls, TagSyntax

SECTION = ("<tool_call>", "</tool_call>")
START = "<function="
SYNTAX = TagSyntax("<parameter=", ">", "</parameter>", "</function>", has_lines=True, optional_end=True)


class Qwen3CoderToolParser(ToolParser):
    """`<function=name><parameter=key>value</parameter></function>`."""

    markers = (*SECTION, START, "</function>")

    def stream(self) -> ToolStream:
        return TaggedCalls(self.tools, SYNTAX, START, section=SECTION)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        begin, end = f"{SECTION[0]}\n{START}{name}>\n", f"{SYNTAX.call_end}\n{SECTION[1]}"
        return (CallSyntax(SECTION[0], begin, end, "qwen_xml"),)
