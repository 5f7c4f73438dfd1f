"""Reasoning of Kimi K2 Thinking and K2.5, which ends with its tag or where the section of tool calls begins.

The output opens the reasoning; the tag may be missing. With `thinking` false the template writes an empty pair of tags.
"""

from __future__ import annotations

from mvllm.extension_api.parsers import ThinkTagParser

SECTION = "<|tool_calls_section_begin|>"


class KimiK2ReasoningParser(ThinkTagParser):
    """`<think>...</think>`, or `<think>...<|tool_calls_section_begin|>`."""

    always_reasons = True
    implicit_ends = (SECTION,)
    markers = (*ThinkTagParser.tags, SECTION)
