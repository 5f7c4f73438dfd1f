"""Reads an answer with all that may be in it: the thoughts first, then the calls in what is left."""

from __future__ import annotations

from collections.abc import Container

from mvllm.entrypoints.parsers.interface import (
    ContentDelta,
    Delta,
    Parsed,
    ReasoningParser,
    ReasoningStream,
    ToolParser,
    ToolStream,
    collect,
)


class AnswerParser:
    """The parsers of one request. See `mvllm.entrypoints.parsers` for how to drive it.

    Args:
        tools: Finds the calls; None where the request has no tools, or `tool_choice` is none: all is content.
        reasoning: Tells the thoughts apart; None where nobody asked for that.
    """

    def __init__(self, *, tools: ToolParser | None = None, reasoning: ReasoningParser | None = None) -> None:
        self._tools = tools
        self._reasoning = reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that must reach the parsers."""
        return tuple(marker for one in (self._reasoning, self._tools) if one is not None for marker in one.markers)

    def needs_special_tokens(self, special_tokens: Container[str]) -> bool:
        """Whether `skip_special_tokens` must be off.

        Args:
            special_tokens: Texts of the tokenizer's special tokens.
        """
        return any(marker in special_tokens for marker in self.markers)

    def stream(self, prompt: str | None = None) -> AnswerStream:
        """A reader for one sequence.

        Args:
            prompt: What the model continues, or just its end; see `ReasoningParser.stream`.
        """
        return AnswerStream(
            self._tools.stream() if self._tools is not None else None,
            self._reasoning.stream(prompt) if self._reasoning is not None else None,
        )

    def parse(self, text: str, prompt: str | None = None) -> Parsed:
        """Reads a whole answer: what its pieces would add up to."""
        stream = self.stream(prompt)
        return collect([*stream.feed(text), *stream.finish()])


class AnswerStream:
    """Reads one sequence. Not thread-safe.

    Args:
        tools: Finds calls in what is not thought. Also one of `mvllm.entrypoints.parsers.tool_choice`.
        reasoning: Tells the thoughts apart.
    """

    def __init__(self, tools: ToolStream | None = None, reasoning: ReasoningStream | None = None) -> None:
        self._tools = tools
        self._reasoning = reasoning

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._tools.num_calls if self._tools is not None else 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within the thoughts."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of text, of any length, and gives what has become certain, in order."""
        if self._reasoning is not None:
            return self._find_calls(self._reasoning.feed(text))
        if self._tools is not None:
            return self._tools.feed(text)
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        """Gives what was held back until now: there is no more text. Called once."""
        rest = self._find_calls(self._reasoning.finish()) if self._reasoning is not None else []
        return [*rest, *self._tools.finish()] if self._tools is not None else rest

    def _find_calls(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        out: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                out += self._tools.feed(delta.text)
            else:
                out.append(delta)
        return out
