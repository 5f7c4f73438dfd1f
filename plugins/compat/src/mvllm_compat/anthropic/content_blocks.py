"""Builds the content blocks of a message and the events of its stream from the parser's deltas.

    delta                    block               events
    ReasoningDelta           thinking            content_block_start, thinking_delta ..., signature_delta, ..._stop
    ContentDelta             text                content_block_start, text_delta ..., content_block_stop
    ToolCallDelta            tool_use            content_block_start, input_json_delta ..., content_block_stop

One block is open at a time; a delta of another kind closes it. A response without a stream ignores the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mvllm.extension_api import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from mvllm.extension_api.http import encode_json
from mvllm_compat.tool_arguments import arguments_object

SIGNATURE = "bXZsbG06IG5vdCBzaWduZWQ="
"""The signature of every thinking block. Thinking is plain text here, and nothing checks it; clients expect a text of
base64 that they can send back."""

_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def encode_event(kind: str, **fields: Any) -> bytes:
    """A server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode_json({"type": kind, **fields}))


class ContentBlocks:
    """The content of one message.

    Attributes:
        blocks: The blocks so far. The last one is complete after `finish`.
        num_calls: How many of them are tool calls.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.num_calls = 0
        self._kind: str | None = None  # of the open block
        self._text: list[str] = []  # of the open block
        self._delta_prefix = b""  # its events, up to the new text
        self._leading_space = ""  # of a text block that may follow
        self._call: int | None = None

    def append(self, deltas: Iterable[Delta]) -> bytes:
        """Adds deltas to the blocks; returns their events."""
        written = b""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                written += self._add_content(delta.text)
            elif isinstance(delta, ReasoningDelta):
                written += self._switch_to("thinking") + self._add(delta.text)
            elif isinstance(delta, ToolCallDelta):
                if self._call != delta.index or self._kind != "tool_use":
                    written += self._close() + self._begin_call(delta)
                if delta.arguments:
                    written += self._add(delta.arguments)
        return written

    def finish(self) -> bytes:
        """Closes the open block; returns the events."""
        written = b""
        if not self.blocks:  # an empty output is an empty text
            written = self._switch_to("text")
            if self._leading_space:
                written += self._add(self._leading_space)
        return written + self._close()

    def _add_content(self, text: str) -> bytes:
        if self._kind != "text":
            text = self._leading_space + text
            if not text.strip():  # white space around tool calls is dropped, unless text follows
                self._leading_space = text
                return b""
            self._leading_space = ""
        return self._switch_to("text") + self._add(text)

    def _switch_to(self, kind: str) -> bytes:
        return b"" if self._kind == kind else self._close() + self._begin(dict(_EMPTY[kind]), *_DELTAS[kind])

    def _begin_call(self, delta: ToolCallDelta) -> bytes:
        self._call = delta.index
        self.num_calls += 1
        call_id = f"toolu_{(delta.id or '').removeprefix('call_')}"
        block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": delta.name, "input": {}}
        return self._begin(block, "input_json_delta", "partial_json")

    def _begin(self, block: dict[str, Any], delta_type: str, field: str) -> bytes:
        index = len(self.blocks)
        self._kind, self._text = block["type"], []
        self._delta_prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
        ) % (index, delta_type.encode(), field.encode())
        written = encode_event("content_block_start", index=index, content_block=block)
        self.blocks.append(block)
        return written

    def _add(self, text: str) -> bytes:
        self._text.append(text)
        return self._delta_prefix + encode_json(text) + b"}}\n\n"

    def _close(self) -> bytes:
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        index, text, written = len(self.blocks) - 1, "".join(self._text), b""
        block = self.blocks[-1]
        if kind == "tool_use":
            block["input"] = arguments_object(text)
        else:
            block[kind] = text
        if kind == "thinking":
            block["signature"] = SIGNATURE
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            written = encode_event("content_block_delta", index=index, delta=delta)
        return written + encode_event("content_block_stop", index=index)
