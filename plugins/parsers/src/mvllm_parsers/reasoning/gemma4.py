"""Reasoning of Gemma 4: a channel with the label `thought`.

    <|channel>thought
    I add.<channel|>4

With `enable_thinking` false the templates of the larger models write an empty channel into the prompt.
"""

from __future__ import annotations

from mvllm.extension_api.parsers import TaggedReasoningParser


class Gemma4ReasoningParser(TaggedReasoningParser):
    """`<|channel>thought\\n...<channel|>`; the label may be missing."""

    tags = ("<|channel>thought\n", "<channel|>")
    more_tags = (("<|channel>", "<channel|>"),)
    implicit_ends = ("<|tool_call>",)
    markers = ("<|channel>", "<channel|>", "<|tool_call>")
