"""Reasoning of Olmo 3 Think, whose template opens it. The tags are ordinary text, not special tokens."""

from __future__ import annotations

from mvllm.extension_api.parsers import ThinkTagParser


class Olmo3ReasoningParser(ThinkTagParser):
    """`<think>...</think>`, with an optional opening tag."""

    always_reasons = True
