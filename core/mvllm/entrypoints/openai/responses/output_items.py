"""Builds the items of a response and the events of its stream from the parser's deltas.

    delta                    item                events
    ReasoningDelta           reasoning           output_item.added, content_part.added, reasoning_text.delta ... .done
    ContentDelta             message             the same with output_text
    ToolCallDelta            function_call       output_item.added, function_call_arguments.delta ... .done

One item is open at a time; a delta of another kind closes it. A response without a stream ignores the events.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.parsers.interface import ContentDelta, Delta, ReasoningDelta, ToolCallDelta

_IDS = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseEventEncoder:
    """Encodes and numbers the events of one stream."""

    def __init__(self) -> None:
        self._next = 0

    def encode(self, kind: str, **fields: Any) -> bytes:
        """An event with these fields."""
        return self.encode_raw(kind, encode_json(fields)[1:-1])

    def encode_raw(self, kind: str, fields: bytes) -> bytes:
        """An event whose fields are encoded already, without their braces."""
        name = kind.encode()
        number, self._next = self._next, self._next + 1
        return b'event: %s\ndata: {"type":"%s","sequence_number":%d,%s}\n\n' % (name, name, number, fields)


class OutputItems:
    """The items of one response.

    Args:
        events: Encodes the events.
    """

    def __init__(self, events: ResponseEventEncoder) -> None:
        self.items: list[dict[str, Any]] = []
        self._events = events
        self._open: dict[str, Any] | None = None  # the last item, while more may come
        self._text: list[str] = []  # of the open item
        self._delta_prefix = b""  # fields of its deltas, up to the new text
        self._leading_space = ""  # of a message that may follow
        self._call: int | None = None

    def append(self, deltas: Iterable[Delta]) -> bytes:
        """Adds deltas to the items; returns their events."""
        written = b""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                written += self._add_content(delta.text)
            elif isinstance(delta, ReasoningDelta):
                written += self._switch_to("reasoning") + self._add(delta.text)
            elif isinstance(delta, ToolCallDelta):
                if self._call != delta.index or self._kind != "function_call":
                    written += self._close("completed")
                    written += self._begin_call(delta)
                if delta.arguments:
                    written += self._add(delta.arguments)
        return written

    def finish(self, status: str) -> bytes:
        """Closes the open item; returns the events.

        Args:
            status: Of the open item: `completed` or `incomplete`.
        """
        written = b""
        if not self.items:  # an empty output is an empty message
            written = self._switch_to("message")
            if self._leading_space:
                written += self._add(self._leading_space)
        return written + self._close(status)

    @property
    def _kind(self) -> str | None:
        return None if self._open is None else self._open["type"]

    def _add_content(self, text: str) -> bytes:
        if self._kind != "message":
            text = self._leading_space + text
            if not text.strip():  # whitespace around function calls is dropped, unless text follows
                self._leading_space = text
                return b""
            self._leading_space = ""
        return self._switch_to("message") + self._add(text)

    def _switch_to(self, kind: str) -> bytes:
        return b"" if self._kind == kind else self._close("completed") + self._begin(kind)

    def _begin(self, kind: str) -> bytes:
        item: dict[str, Any] = {"id": _new_id(kind), "type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item["role"] = "assistant"
        else:
            item["summary"] = []
        written = self._open_item(item)
        where = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        self._delta_prefix = encode_json(where)[1:-1] + b',"delta":'
        return written + self._events.encode("response.content_part.added", **where, part=_part(kind, ""))

    def _begin_call(self, delta: ToolCallDelta) -> bytes:
        self._call = delta.index
        item = {
            "id": _new_id("function_call"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": delta.id,
            "name": delta.name,
            "arguments": "",
        }
        written = self._open_item(item)
        self._delta_prefix = (
            encode_json({"item_id": item["id"], "output_index": len(self.items) - 1})[1:-1] + b',"delta":'
        )
        return written

    def _open_item(self, item: dict[str, Any]) -> bytes:
        self._open, self._text = item, []
        self.items.append(item)
        return self._events.encode("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _add(self, text: str) -> bytes:
        self._text.append(text)
        fields = self._delta_prefix + encode_json(text)
        if self._kind == "message":
            return self._events.encode_raw("response.output_text.delta", fields + b',"logprobs":[]')
        if self._kind == "reasoning":
            return self._events.encode_raw("response.reasoning_text.delta", fields)
        return self._events.encode_raw("response.function_call_arguments.delta", fields)

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        events, kind, text = self._events, item["type"], "".join(self._text)
        index = len(self.items) - 1
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if kind == "function_call":
            item["arguments"] = text
            written = events.encode("response.function_call_arguments.done", **where, arguments=text)
        else:
            where["content_index"] = 0
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            written = events.encode(f"response.{_PARTS[kind]}.done", **where, text=text, **more)
            item["content"] = [_part(kind, text)]
            written += events.encode("response.content_part.done", **where, part=item["content"][0])
        item["status"] = status
        return written + events.encode("response.output_item.done", output_index=index, item=item)


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "message" else part


def _new_id(kind: str) -> str:
    return f"{_IDS[kind]}{uuid.uuid4().hex}"
