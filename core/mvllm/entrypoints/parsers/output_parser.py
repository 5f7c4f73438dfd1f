"""Parser of whole outputs: separates the reasoning first, then finds tool calls in the rest."""

from __future__ import annotations

from collections.abc import Container

from mvllm.entrypoints.parsers.checked_calls import CallsChecker
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
    """The parsers of one request. `mvllm.entrypoints.parsers` shows its use.

    Args:
        tools: Finds tool calls; None if the request has no tools, or `tool_choice` is `none`.
        reasoning: Separates the reasoning; None to leave it in the content.
        include_reasoning: Whether reasoning is returned (`include_reasoning` of the request).
        single_call: Whether calls after the first are dropped (`parallel_tool_calls` false).
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
        """Strings that the parsers need in the text."""
        return tuple(marker for one in (self._reasoning, self._tools) if one is not None for marker in one.markers)

    @property
    def is_passthrough(self) -> bool:
        """Whether all text is content, so that the parser can be skipped."""
        return self._tools is None and self._reasoning is None

    def needs_special_tokens(self, special_tokens: Container[str]) -> bool:
        """Whether `skip_special_tokens` must be off.

        Args:
            special_tokens: Texts of the tokenizer's special tokens.
        """
        return any(marker in special_tokens for marker in self.markers)

    def stream(self, prompt: str | None = None, calls: ToolStream | None = None) -> OutputParserStream:
        """Creates an incremental parser for one sequence.

        Args:
            prompt: The prompt, or its end; see `ReasoningParser.stream`.
            calls: Finds the calls in place of the tool parser; see `ToolChoice.stream`.
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
        """The tags of the reasoning in an output after `prompt`; None without reasoning or without fixed tags.

        Returns:
            The opening tag, or None if the output begins inside the reasoning; and the closing tag.
        """
        if self._reasoning is None or self._reasoning.tags is None:
            return None
        start, end = self._reasoning.tags
        stream = self._reasoning.stream(prompt)
        if stream.in_reasoning:
            return None, end
        stream.feed(start)
        return (start, end) if stream.in_reasoning else None  # the prompt has closed the reasoning

    def continued_prompt(self, prompt: str, message: str) -> str:
        """The prompt that the other methods get if its last message, `message`, is continued."""
        return prompt if self._reasoning is None else self._reasoning.continued_prompt(prompt, message)

    def thinking_tags_for(self, prompt: str | None) -> list[str] | None:
        """`thinking_tags`, without the opening tag if the output begins inside the reasoning; None if the prompt has
        closed the reasoning."""
        tags = self.thinking_tags
        if tags is None or self._reasoning is None or self._reasoning.tags is None:
            return tags
        stream = self._reasoning.stream(prompt)
        if stream.in_reasoning:
            return ["", *tags[1:]]
        stream.feed(self._reasoning.tags[0])
        return tags if stream.in_reasoning else None

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is separated."""
        return self._reasoning is not None

    def reasoning_stream(self, prompt: str | None = None) -> ReasoningStream:
        """An incremental parser of the reasoning alone. Only with `has_reasoning`."""
        assert self._reasoning is not None
        return self._reasoning.stream(prompt)

    @property
    def thinking_tags(self) -> list[str] | None:
        """`SamplingParams.thinking_tags` for a thinking budget; None without reasoning or without fixed tags."""
        return None if self._reasoning is None else self._reasoning.budget_tags()

    def parse(self, text: str, prompt: str | None = None) -> ParsedOutput:
        """Parses a whole output."""
        return self.stream(prompt).parse(text)


class OutputParserStream(DeltaStream):
    """Incremental parser of one sequence: reasoning, content and tool calls. See DeltaStream.

    Args:
        tools: Finds tool calls in the text after the reasoning.
        reasoning: Separates the reasoning.
        include_reasoning, single_call: As for OutputParser.

    Attributes:
        num_reasoning_deltas: How many pieces of reasoning there were, returned or not.
    """

    num_reasoning_deltas = 0

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
        self._checker = CallsChecker()

    @property
    def num_calls(self) -> int:
        """Number of calls that have started, dropped ones excluded."""
        found = self._tools.num_calls if self._tools is not None else 0
        return min(found, 1) if self._one_call else found

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    def finish_reason(self, reason: str | None) -> str | None:
        """The API's `finish_reason`: `tool_calls` replaces `stop` if there are calls."""
        return finish_reason_with_tools(reason, self.num_calls)

    def feed(self, text: str) -> list[Delta]:
        """Parses the next piece of text; returns the deltas that no later text can change, in order."""
        if self._reasoning is not None:
            return self._find_calls(self._reasoning.feed(text))
        if self._tools is not None:
            return self._checked(self._tools.feed(text))
        return [ContentDelta(text)] if text else []

    def finish(self, reason: str | None = None) -> list[Delta]:
        """Ends the text; returns the deltas that were held back. Called once.

        Args:
            reason: The finish reason. The arguments of a call that has no end are closed after `stop`, so that they are
                JSON. After `length` or another reason that cuts the output they remain incomplete JSON. None is `stop`.
        """
        rest = self._find_calls(self._reasoning.finish()) if self._reasoning is not None else []
        is_cut = reason not in (None, "stop")
        if self._tools is not None:
            self._tools.is_cut = is_cut
            rest += self._checked(self._tools.finish())
        return [*rest, *self._checker.finish(is_cut=is_cut)]

    def _find_calls(self, deltas: list[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self.num_reasoning_deltas += 1
                if self._show_reasoning:
                    out.append(delta)
            elif isinstance(delta, ContentDelta) and self._tools is not None:
                out += self._checked(self._tools.feed(delta.text))
            else:
                out.append(delta)
        return out

    def _checked(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas with checked arguments, without those of dropped calls."""
        if self._one_call:
            deltas = [delta for delta in deltas if not (isinstance(delta, ToolCallDelta) and delta.index)]
        return self._checker.check(deltas)
