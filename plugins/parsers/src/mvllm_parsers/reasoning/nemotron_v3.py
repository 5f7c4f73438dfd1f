"""Reasoning of Nemotron Nano 2 and Nemotron 3, whose templates open it, or write an empty pair of tags.

The switch is `enable_thinking` in Nemotron 3, and `/think` or `/no_think` in a message for the earlier models. A tool
call in the format of Qwen3-Coder may begin inside the reasoning, and ends it.
"""

from __future__ import annotations

from mvllm.extension_api.parsers import ThinkTagParser


class NemotronReasoningParser(ThinkTagParser):
    """`<think>...</think>`, with an optional opening tag."""

    always_reasons = True
    implicit_ends = ("<tool_call>\n<function=", "<tool_call><function=")
