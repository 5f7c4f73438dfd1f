"""Reasoning of Qwen3 and other models whose reasoning can be switched off.

Reasoning starts where the output starts with the opening tag, or where the prompt ends with it (models that always
reason). With `enable_thinking` false the chat template writes an empty pair of tags, and the whole output is content.
Qwen3.5 may call a tool without closing its reasoning.
"""

from __future__ import annotations

from mvllm.entrypoints.parsers.reasoning.tagged import ThinkTagParser


class Qwen3ReasoningParser(ThinkTagParser):
    """`<think>...</think>`, or no reasoning at all."""

    implicit_ends = ("<tool_call>\n<function=", "<tool_call><function=")
