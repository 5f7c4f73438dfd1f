"""Reasoning of Granite 3.2, between sentences, and of Granite 3.3, between tags.

    Here is my thought process: I add. Here is my response: 4
    <think>I add.</think><response>4</response>

It is switched on by `thinking` true in `chat_template_kwargs`. The sentences may say "Here's".
"""

from __future__ import annotations

from mvllm_parsers.reasoning.wrapped_content import WrappedContentParser


class GraniteReasoningParser(WrappedContentParser):
    """`Here is my thought process: ... Here is my response: ...`."""

    tags = ("Here is my thought process:", "Here is my response:")
    more_tags = (("Here's my thought process:", "Here's my response:"), ("<think>", "</think>"))
    content_tags = ("<response>", "</response>")
    markers = (*more_tags[-1], *content_tags)
