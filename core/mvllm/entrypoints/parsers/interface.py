"""Interfaces of output parsers: deltas, parsed outputs, incremental streams, tool parsers and reasoning parsers."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mvllm.entrypoints.parsers.checked_calls import CallsChecker
from mvllm.entrypoints.parsers.deltas import ContentDelta as ContentDelta
from mvllm.entrypoints.parsers.deltas import Delta as Delta
from mvllm.entrypoints.parsers.deltas import ParsedOutput as ParsedOutput
from mvllm.entrypoints.parsers.deltas import ReasoningDelta as ReasoningDelta
from mvllm.entrypoints.parsers.deltas import ToolCall as ToolCall
from mvllm.entrypoints.parsers.deltas import ToolCallDelta as ToolCallDelta
from mvllm.entrypoints.parsers.deltas import finish_reason_with_tools as finish_reason_with_tools
from mvllm.entrypoints.parsers.deltas import merge_deltas as merge_deltas


class DeltaStream(ABC):
    """Incremental parser of one sequence's text. Not thread-safe.

    The deltas add up to the same output however the text is split. No text of a model raises.
    """

    @abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """Parses the next piece of text, of any length; returns the deltas that no later text can change, in order."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """Ends the text; returns the deltas that were held back. Called once."""

    def parse(self, text: str) -> ParsedOutput:
        """Parses a whole output. Called once, in place of `feed` and `finish`."""
        return merge_deltas([*self.feed(text), *self.finish()])


class ToolStream(DeltaStream):
    """Incremental parser that finds the tool calls of one sequence. See DeltaStream."""

    num_calls: int = 0
    """Number of calls that have started."""

    is_cut: bool = False
    """Whether the output was cut off, by `max_tokens` for instance. Set before `finish`."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes a call, for structured output that constrains its arguments to the function's schema.

    Attributes:
        trigger: The text after which a call is constrained: a prefix of `begin`.
        begin: The text before the arguments.
        end: The text after them.
        style: How the arguments are written: `json`, or a style of structural tags.
        separator: For `numbered_json`, the text between number and arguments.
        special_tokens: Special tokens that may stand outside of calls.
    """

    trigger: str
    begin: str
    end: str
    style: str = "json"
    separator: str = ""
    special_tokens: tuple[str, ...] = ()


class ToolParser(ABC):
    """Parser of one tool call format. Entry points of `mvllm.tool_parsers` name subclasses.

    Args:
        tools: The request's tools, for formats that need their schemas.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Strings that delimit calls. If one is a special token, `skip_special_tokens` must be off."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools

    @abstractmethod
    def stream(self) -> ToolStream:
        """Creates an incremental parser for one sequence."""

    def call_syntax(self, name: str) -> tuple[CallSyntax, ...]:
        """How a call of the function `name` is written, in each of the format's forms, for strict functions.

        Empty if no grammar can constrain the arguments.
        """
        return ()

    def parse(self, text: str) -> ParsedOutput:
        """Parses a whole output, and checks the arguments of its calls."""
        stream, checker = self.stream(), CallsChecker()
        found = [*checker.check(stream.feed(text)), *checker.check(stream.finish())]
        return merge_deltas([*found, *checker.finish(is_cut=False)])


class ReasoningStream(DeltaStream):
    """Incremental parser that separates the reasoning of one sequence from its content. See DeltaStream.

    It returns ReasoningDeltas, and ContentDeltas for the rest of the text, tool calls included.
    """

    @property
    @abstractmethod
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning. Tokens count as reasoning then; no grammar applies."""


class ReasoningParser(ABC):
    """Parser of one reasoning format. Entry points of `mvllm.reasoning_parsers` name subclasses."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Strings that delimit the reasoning; see `ToolParser.markers`."""

    tags: ClassVar[tuple[str, str] | None] = None
    """The texts that open and close the reasoning, if they are fixed. Structured output then applies after the
    reasoning; without tags, structured output excludes reasoning."""

    thinking_tags: ClassVar[tuple[str, ...] | None] = None
    """`SamplingParams.thinking_tags` of the format, if they are not `tags`."""

    implicit_ends: ClassVar[tuple[str, ...]] = ()
    """Texts that end the reasoning and belong to the content, for instance the beginning of a tool call."""

    @classmethod
    def budget_tags(cls) -> list[str] | None:
        """`SamplingParams.thinking_tags` of a request with a thinking budget; None if the format has no fixed tags."""
        tags = cls.thinking_tags or cls.tags
        if tags is None:
            return None
        start, end, *forced = tags
        return [start, end, *(forced or [end]), *cls.implicit_ends]

    def continued_prompt(self, prompt: str, message: str) -> str:
        """What `stream` gets in place of a prompt whose last message is continued; by default the prompt.

        Args:
            prompt: It ends within the message.
            message: The text of the message. Reasoning may begin or end in it.
        """
        return prompt

    @abstractmethod
    def stream(self, prompt: str | None = None) -> ReasoningStream:
        """Creates an incremental parser for one sequence.

        Args:
            prompt: The prompt, or its end. The chat template may open the reasoning there, or close it
                (`enable_thinking` false). None if unknown.
        """

    def parse(self, text: str, prompt: str | None = None) -> ParsedOutput:
        """Parses a whole output."""
        return self.stream(prompt).parse(text)


def make_call_id() -> str:
    """A new id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"
