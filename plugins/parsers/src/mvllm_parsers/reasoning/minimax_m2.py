"""Reasoning of MiniMax-M2, which always reasons: its template opens the reasoning.

The model expects its reasoning in the messages of later turns. `minimax_m2_append_think` leaves it in the content, for
clients that send back only the content.
"""

from __future__ import annotations

from mvllm.extension_api.parsers import ContentDelta, Delta, ReasoningParser, ReasoningStream, ThinkTagParser


class MiniMaxM2ReasoningParser(ThinkTagParser):
    """`<think>...</think>`, with an optional opening tag."""

    always_reasons = True
    implicit_ends = ("<minimax:tool_call>",)
    markers = (*ThinkTagParser.tags, *implicit_ends)


class MiniMaxM2AppendThinkParser(ReasoningParser):
    """Content of everything, with the opening tag that the template has written."""

    markers = ThinkTagParser.tags
    thinking_tags = ("", ThinkTagParser.tags[1])
    implicit_ends = MiniMaxM2ReasoningParser.implicit_ends

    def stream(self, prompt: str | None = None) -> ReasoningStream:
        return _WithOpeningTag()


class _WithOpeningTag(ReasoningStream):
    def __init__(self) -> None:
        self._has_started = False

    @property
    def in_reasoning(self) -> bool:
        return False

    def feed(self, text: str) -> list[Delta]:
        if not text:
            return []
        start = "" if self._has_started else ThinkTagParser.tags[0]
        self._has_started = True
        return [ContentDelta(start + text)]

    def finish(self) -> list[Delta]:
        return []
