"""Reasoning of Seed-OSS, which has tags of its own."""

from __future__ import annotations

from mvllm.extension_api.parsers import TaggedReasoningParser


class SeedOssReasoningParser(TaggedReasoningParser):
    """`<seed:think>...</seed:think>`."""

    tags = ("<seed:think>", "</seed:think>")
    markers = tags
