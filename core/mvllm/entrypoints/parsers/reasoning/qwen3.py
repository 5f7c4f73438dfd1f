"""Thoughts as Qwen3 writes them, and as others do that may think or not.

The model opens them itself, or its template does at the end of the prompt (the models that always think). With
`enable_thinking` false the template writes an empty pair of tags, and all that comes is the answer; so is a text that
does not begin with the tag.
"""

from __future__ import annotations

from mvllm.entrypoints.parsers.interface import ReasoningParser, ReasoningStream
from mvllm.entrypoints.parsers.reasoning.tagged import TaggedReasoning, ends_with_tag

START, END = "<think>", "</think>"


class Qwen3ReasoningParser(ReasoningParser):
    """`<think>...</think>`, if it begins so."""

    markers = (START, END)
    tags = (START, END)

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        return TaggedReasoning(START, END, opened=ends_with_tag(prompt, START), closed=ends_with_tag(prompt, END))
