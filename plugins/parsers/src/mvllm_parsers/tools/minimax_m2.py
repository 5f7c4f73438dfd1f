"""Tool call format of MiniMax-M2: calls in XML-like tags.

<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from mvllm.extension_api.parsers import CallSyntax, ToolParser, ToolStream
from mvllm_parsers.tagged_arguments import TaggedCalls, TagSyntax

SECTION = ("<minimax:tool_call>", "</minimax:tool_call>")
START = "<invoke name="
SYNTAX = TagSyntax("<parameter name=", ">", "</parameter>", "</invoke>", optional_end=True)


class MiniMaxM2ToolParser(ToolParser):
    """`<invoke name="name"><parameter name="key">value</parameter></invoke>`."""

    markers = SECTION

    def stream(self) -> ToolStream:
        return TaggedCalls(self.tools, SYNTAX, START, section=SECTION)

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        return (CallSyntax(START, f'{START}"{name}">\n', SYNTAX.call_end, "minimax_xml", special_tokens=SECTION),)
