"""Reasoning of ERNIE 4.5 Thinking, whose template opens it, before a response with tags."""

from __future__ import annotations

from mvllm_parsers.reasoning.wrapped_content import WrappedContentParser


class Ernie45ReasoningParser(WrappedContentParser):
    """`<think>...</think><response>...</response>`, with an optional opening tag."""

    tags = ("<think>", "</think>")
    content_tags = ("<response>", "</response>")
    markers = (*tags, *content_tags)
    always_reasons = True
