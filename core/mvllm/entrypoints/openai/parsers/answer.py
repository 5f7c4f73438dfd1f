"""One answer of a chat in the parts that the API has: thoughts, text, calls."""

from __future__ import annotations

import secrets
from typing import Any

from mvllm.entrypoints.openai.parsers.interface import Parser, Part, Reasoning, Text, ToolCall


class AnswerParser:
    """Takes an answer apart and puts its parts into the shape of the API, for streams and whole answers alike.

    Args:
        reasoning: Finds thoughts; None where there are none to be found.
        tools: Finds calls in what is no thought; None where there are none to be found.
        show_reasoning: Whether thoughts are part of what the client gets.
        one_call: Whether only the first call counts.
    """

    def __init__(
        self, reasoning: Parser | None, tools: Parser | None, *, show_reasoning: bool = True, one_call: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._show_reasoning = show_reasoning
        self._one_call = one_call
        self.num_calls = 0

    def feed(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """The deltas of the next piece of text; of everything held back, too, if it is the last one."""
        parts: list[Part] = [Text(text)] if text else []
        for parser in (self._reasoning, self._tools):
            if parser is not None:
                parts = _through(parser, parts, last=last)
        deltas: list[dict[str, Any]] = []
        for part in parts:
            deltas += self._deltas(part)
        return deltas

    def message(self, text: str) -> dict[str, Any]:
        """A whole answer as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for delta in self.feed(text, last=True):
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in piece:
                    calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        if message["content"] is None and self.num_calls == 0:
            message["content"] = ""
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended; one that was cut off stays one that was cut off."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def _deltas(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, Text):
            return [{"content": part.text}]
        if isinstance(part, Reasoning):
            # Clients look for either name.
            return [{"reasoning": part.text, "reasoning_content": part.text}] if self._show_reasoning else []
        return self._call(part)

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        if self._one_call and self.num_calls:
            return []
        index = self.num_calls
        self.num_calls += 1
        function = {"name": call.name, "arguments": ""}
        opening = {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        return [
            {"tool_calls": [opening]},
            {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
        ]


def _through(parser: Parser, parts: list[Part], *, last: bool) -> list[Part]:
    """Has a parser look at the text among some parts."""
    found: list[Part] = []
    for part in parts:
        found += parser.feed(part.text) if isinstance(part, Text) else [part]
    if last:
        found += parser.finish()
    return found
