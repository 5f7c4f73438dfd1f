"""Reasoning of Magistral and other models of Mistral, between the special tokens `[THINK]` and `[/THINK]`."""

from __future__ import annotations

from mvllm.extension_api.parsers import TaggedReasoningParser


class MistralReasoningParser(TaggedReasoningParser):
    """`[THINK]...[/THINK]`; without the opening token all is content."""

    tags = ("[THINK]", "[/THINK]")
    markers = tags
