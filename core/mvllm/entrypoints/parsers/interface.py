"""Interfaces of output parsers: deltas, parsed outputs, incremental streams, tool parsers and reasoning parsers."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class Delta(ABC):
    """A piece of an output: a ContentDelta, a ReasoningDelta or a ToolCallDelta."""

    __slots__ = ()

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """The `delta` of a chat completion chunk."""


@dataclass(frozen=True, slots=True)
class ContentDelta(Delta):
    """A piece of the content."""

    text: str

    def as_json(self) -> dict[str, Any]:
        """The `delta` of a chat completion chunk."""
        return {"content": self.text}


@dataclass(frozen=True, slots=True)
class ReasoningDelta(Delta):
    """A piece of the reasoning."""

    text: str

    def as_json(self) -> dict[str, Any]:
        """The `delta` of a chat completion chunk, under both names that clients use."""
        return {"reasoning": self.text, "reasoning_content": self.text}


@dataclass(frozen=True, slots=True)
class ToolCallDelta(Delta):
    """A piece of a tool call. The first has an id, a name and no arguments; later ones have a piece of the arguments.

    Attributes:
        index: Number of the call in this output, from 0.
        id: The call's id; None in later pieces.
        name: The function's name; None in later pieces.
        arguments: A piece of the arguments' JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        """The `delta` of a chat completion chunk."""
        if self.id is None:
            return {"tool_calls": [{"index": self.index, "function": {"arguments": self.arguments}}]}
        function = {"name": self.name, "arguments": self.arguments}
        return {"tool_calls": [{"index": self.index, "id": self.id, "type": "function", "function": function}]}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call.

    Attributes:
        id: Unique id, to which the tool's result refers.
        name: The function's name as generated; it may be unknown to the request.
        arguments: The text of a JSON object. Incomplete if the output was cut off within the call.
    """

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """The entry of `tool_calls` in a chat completion's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A complete output.

    Attributes:
        content: Text that is neither reasoning nor a tool call.
        tool_calls: The calls, in order.
        reasoning: The reasoning; None if there is none.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The `message` of a chat completion. Its content is null if there are only calls."""
        content = None if self.tool_calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """The API's `finish_reason`; see `finish_reason_with_tools`."""
        return finish_reason_with_tools(reason, len(self.tool_calls))


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
        from mvllm.entrypoints.parsers.output_parser import OutputParserStream  # imports this module

        return OutputParserStream(self.stream()).parse(text)


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


def merge_deltas(deltas: Iterable[Delta]) -> ParsedOutput:
    """Joins the deltas of an output."""
    content: list[str] = []
    reasoning: list[str] = []
    heads: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, ToolCallDelta):
            heads.setdefault(delta.index, delta)
            arguments.setdefault(delta.index, []).append(delta.arguments)
    calls = tuple(ToolCall(head.id or "", head.name or "", "".join(arguments[i])) for i, head in heads.items())
    return ParsedOutput("".join(content), calls, "".join(reasoning) if reasoning else None)


def finish_reason_with_tools(reason: str | None, num_calls: int) -> str | None:
    """The `finish_reason` of an output with `num_calls` calls: `tool_calls` replaces `stop`, and never `length`."""
    return "tool_calls" if num_calls and reason == "stop" else reason


def make_call_id() -> str:
    """A new id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"
