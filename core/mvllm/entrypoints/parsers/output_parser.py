"""Reads an answer with all that may be in it: the thoughts first, then the calls in what is left."""

from __future__ import annotations

from collections.abc import Container

from mvllm.entrypoints.parsers.interface import (
    ContentDelta,
    Delta,
    DeltaStream,
    ParsedOutput,
    ReasoningDelta,
    ReasoningParser,
    ReasoningStream,
    ToolCallDelta,
    ToolParser,
    ToolStream,
    finish_reason_with_tools,
)


class OutputParser:
    """The parsers of one request. See `mvllm.entrypoints.parsers` for how to drive it.

    Args:
        tools: Finds the calls; None where the request has no tools, or `tool_choice` is none: all is content.
        reasoning: Tells the thoughts apart; None where nobody asked for that.
        include_reasoning: Whether the thoughts are given out (`include_reasoning`).
        single_call: Whether calls after the first are left out (`parallel_tool_calls` false).
    """

    def __init__(
        self,
        *,
        tools: ToolParser | None = None,
        reasoning: ReasoningParser | None = None,
        include_reasoning: bool = True,
        single_call: bool = False,
    ) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._show_reasoning = include_reasoning
        self._one_call = single_call

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that must reach the parsers."""
        return tuple(marker for one in (self._reasoning, self._tools) if one is not None for marker in one.markers)

    @property
    def is_passthrough(self) -> bool:
        """Whether all is content as it comes, so that a caller may do without."""
        return self._tools is None and self._reasoning is None

    def needs_special_tokens(self, special_tokens: Container[str]) -> bool:
        """Whether `skip_special_tokens` must be off.

        Args:
            special_tokens: Texts of the tokenizer's special tokens.
        """
        return any(marker in special_tokens for marker in self.markers)

    def stream(self, prompt: str | None = None, calls: ToolStream | None = None) -> OutputParserStream:
        """A reader for one sequence.

        Args:
            prompt: What the model continues, or just its end; see `ReasoningParser.stream`.
            calls: Finds the calls in place of the parser; see `ToolChoice.stream`.
        """
        if calls is None and self._tools is not None:
            calls = self._tools.stream()
        return OutputParserStream(
            calls,
            self._reasoning.stream(prompt) if self._reasoning is not None else None,
            include_reasoning=self._show_reasoning,
            single_call=self._one_call,
        )

    def reasoning_tags_for(self, prompt: str | None) -> tuple[str | None, str] | None:
        """What frames the thoughts of an answer to `prompt`; None where there are none, or nobody knows.

        Returns:
            What begins them, or None where the answer begins within them; and what ends them.
        """
        if self._reasoning is None or self._reasoning.tags is None:
            return None
        start, end = self._reasoning.tags
        stream = self._reasoning.stream(prompt)
        if stream.in_reasoning:
            return None, end
        stream.feed(start)
        return (start, end) if stream.in_reasoning else None  # the prompt has closed them

    def parse(self, text: str, prompt: str | None = None) -> ParsedOutput:
        """Parses a whole output."""
        return self.stream(prompt).parse(text)


class OutputParserStream(DeltaStream):
    """Reads one sequence. Not thread-safe.

    Args:
        tools: Finds calls in what is not thought. Also one of `mvllm.entrypoints.parsers.tool_choice`.
        reasoning: Tells the thoughts apart.
        include_reasoning, single_call: As for OutputParser.
    """

    def __init__(
        self,
        tools: ToolStream | None = None,
        reasoning: ReasoningStream | None = None,
        *,
        include_reasoning: bool = True,
        single_call: bool = False,
    ) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._show_reasoning = include_reasoning
        self._one_call = single_call

    @property
    def num_calls(self) -> int:
        """Calls that have begun, and count."""
        found = self._tools.num_calls if self._tools is not None else 0
        return min(found, 1) if self._one_call else found

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within the thoughts."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended, in the API's words: `tool_calls` in place of `stop`, if there are any."""
        return finish_reason_with_tools(reason, self.num_calls)

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of text, of any length, and gives what has become certain, in order."""
        if self._reasoning is not None:
            return self._find_calls(self._reasoning.feed(text))
        if self._tools is not None:
            return self._counting(self._tools.feed(text))
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        """Gives what was held back until now: there is no more text. Called once."""
        rest = self._find_calls(self._reasoning.finish()) if self._reasoning is not None else []
        return [*rest, *self._counting(self._tools.finish())] if self._tools is not None else rest

    def _find_calls(self, deltas: list[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                if self._show_reasoning:
                    out.append(delta)
            elif isinstance(delta, ContentDelta) and self._tools is not None:
                out += self._counting(self._tools.feed(delta.text))
            else:
                out.append(delta)
        return out

    def _counting(self, deltas: list[Delta]) -> list[Delta]:
        """Without the calls that do not count."""
        if not self._one_call:
            return deltas
        return [delta for delta in deltas if not (isinstance(delta, ToolCallDelta) and delta.index)]
