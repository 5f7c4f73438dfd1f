"""What readers of model text give out, and what they are: the two kinds of parsers, and the streams they make."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class Delta(ABC):
    """A piece of an answer: a ContentDelta, a ReasoningDelta or a ToolCallDelta."""

    __slots__ = ()

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """It as the `delta` of a chat completion chunk."""


@dataclass(frozen=True, slots=True)
class ContentDelta(Delta):
    """A piece of the answer itself."""

    text: str

    def as_json(self) -> dict[str, Any]:
        """It as the `delta` of a chat completion chunk."""
        return {"content": self.text}


@dataclass(frozen=True, slots=True)
class ReasoningDelta(Delta):
    """A piece of the thoughts before the answer."""

    text: str

    def as_json(self) -> dict[str, Any]:
        """It as the `delta` of a chat completion chunk, under both names that clients look for."""
        return {"reasoning": self.text, "reasoning_content": self.text}


@dataclass(frozen=True, slots=True)
class ToolCallDelta(Delta):
    """A piece of a call: the first has an id, a name and no arguments yet, each later one a piece of the arguments.

    Attributes:
        index: Which call of this answer, from 0.
        id: The call's id; None in later pieces.
        name: The function's name; None in later pieces.
        arguments: A piece of the arguments' JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        """It as the `delta` of a chat completion chunk."""
        if self.id is None:
            return {"tool_calls": [{"index": self.index, "function": {"arguments": self.arguments}}]}
        function = {"name": self.name, "arguments": self.arguments}
        return {"tool_calls": [{"index": self.index, "id": self.id, "type": "function", "function": function}]}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call.

    Attributes:
        id: Unique; what the tool's result refers to.
        name: The function's name, as the model wrote it: it may not be one of the request's.
        arguments: JSON text as the model wrote it. What it wrote may be no JSON, or end early; it is never evaluated.
    """

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """It as an entry of `tool_calls` in a chat completion's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer.

    Attributes:
        content: The answer without the rest; empty where there is none.
        tool_calls: The calls, in order.
        reasoning: The thoughts; None where the model wrote none.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None

    def as_json(self) -> dict[str, Any]:
        """It as the `message` of a chat completion, whose content is null where there are calls and nothing else."""
        content = None if self.tool_calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended, in the API's words; see `finish_reason_with_tools`."""
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


class ToolParser(ABC):
    """A model family's way to write calls. What an entry point of `mvllm.tool_parsers` names.

    Args:
        tools: The request's tools, as it gave them, for formats that cannot be read without their schemas.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Strings that frame calls. Where the tokenizer has one as a special token, `skip_special_tokens` would hide it."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools

    @abstractmethod
    def stream(self) -> ToolStream:
        """A reader for one answer."""

    def parse(self, text: str) -> ParsedOutput:
        """Parses a whole output."""
        return self.stream().parse(text)


class ReasoningStream(DeltaStream):
    """Incremental parser that separates the reasoning of one sequence from its content. See DeltaStream.

    It returns ReasoningDeltas, and ContentDeltas for the rest of the text, tool calls included.
    """

    @property
    @abstractmethod
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning. Tokens count as reasoning then; no grammar applies."""


class ReasoningParser(ABC):
    """A model family's way to think aloud. What an entry point of `mvllm.reasoning_parsers` names."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Strings that frame thoughts; see `ToolParser.markers`."""

    tags: ClassVar[tuple[str, str] | None] = None
    """What opens and what closes the thoughts, where that is two fixed texts. An answer that must have a form then has
    it behind its thoughts; otherwise there are no thoughts in such an answer."""

    @abstractmethod
    def stream(self, prompt: str | None = None) -> ReasoningStream:
        """A reader for one answer.

        Args:
            prompt: What the model continues, or just its end. A chat template may have opened the thoughts there, or
                closed them (`enable_thinking` false). None where it is not known.
        """

    def parse(self, text: str, prompt: str | None = None) -> ParsedOutput:
        """Parses a whole output."""
        return self.stream(prompt).parse(text)


def merge_deltas(deltas: Iterable[Delta]) -> ParsedOutput:
    """Puts an answer's deltas together."""
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
    """The `finish_reason` of an answer with calls. One that was cut off stays one that was cut off."""
    return "tool_calls" if num_calls and reason == "stop" else reason


def make_call_id() -> str:
    """A new id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
