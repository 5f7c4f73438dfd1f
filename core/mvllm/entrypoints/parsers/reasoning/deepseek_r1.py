"""Reasoning of DeepSeek-R1, its distilled models, and other models that always reason.

Their chat templates open the reasoning at the end of the prompt, so that outputs may lack the opening tag. The whole
output is reasoning until the closing tag, except where the prompt already contains it.
"""

from __future__ import annotations

from mvllm.entrypoints.parsers.reasoning.tagged import ThinkTagParser


class DeepSeekR1ReasoningParser(ThinkTagParser):
    """`<think>...</think>`, with an optional opening tag."""

    always_reasons = True
