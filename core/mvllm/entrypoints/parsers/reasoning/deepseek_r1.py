"""Thoughts as DeepSeek-R1 and its distilled models write them, and as others do that always think.

Templates open the thoughts at the end of the prompt, so the tag that opens them may be missing. All is thoughts until
they are closed, be it the whole text; unless the prompt has closed them.
"""

from __future__ import annotations

from mvllm.entrypoints.parsers.interface import ReasoningParser, ReasoningStream
from mvllm.entrypoints.parsers.reasoning.tagged import TaggedReasoning, ends_with_tag

START, END = "<think>", "</think>"


class DeepSeekR1ReasoningParser(ReasoningParser):
    """`<think>...</think>`, of which the first may be missing."""

    markers = (START, END)
    tags = (START, END)

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        return TaggedReasoning(START, END, opened=True, closed=ends_with_tag(prompt, END))
