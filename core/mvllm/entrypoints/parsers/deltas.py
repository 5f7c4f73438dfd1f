"""Pieces of an output and whole outputs: deltas, tool calls, ParsedOutput."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


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
