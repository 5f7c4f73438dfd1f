"""Reasoning of Hunyuan A13B before an answer with tags. Without thinking the tags of the reasoning are empty."""

from __future__ import annotations

from mvllm_parsers.reasoning.wrapped_content import WrappedContentParser


class HunyuanA13BReasoningParser(WrappedContentParser):
    """`<think>...</think><answer>...</answer>`."""

    tags = ("<think>", "</think>")
    content_tags = ("<answer>", "</answer>")
    markers = (*tags, *content_tags)
