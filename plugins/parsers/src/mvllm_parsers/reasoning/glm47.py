"""Reasoning of GLM-4.5 to GLM-4.7.

    GLM-4.5    the output opens it; without thinking the prompt ends with <think></think>
    GLM-4.7    the prompt opens it; without thinking the prompt ends with </think>

A tool call may begin inside the reasoning, and ends it.
"""

from __future__ import annotations

from mvllm.extension_api.parsers import ThinkTagParser


class GLMReasoningParser(ThinkTagParser):
    """`<think>...</think>`, as the prompt says."""

    implicit_ends = ("<tool_call>",)
    markers = (*ThinkTagParser.tags, *implicit_ends)
