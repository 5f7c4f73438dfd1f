"""Builds the items of a response and the events of its stream from the parser's deltas.

    delta                    item                events
    ReasoningDelta           reasoning           output_item.added, content_part.added, reasoning_text.delta ... .done
    ContentDelta             message             the same with output_text
    ToolCallDelta            function_call       output_item.added, function_call_arguments.delta ... .done
     of a tool server        mcp_call            output_item.added, mcp_call.in_progress, mcp_call_arguments.delta ...
     that needs approval     mcp_approval_request    output_item.added, output_item.done

One item is open at a time; a delta of another kind closes it. A response without a stream ignores the events. An
`mcp_call` is done when the server has run it, after the turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mvllm.extension_api import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from mvllm.extension_api.http import encode_json
from mvllm_responses.items import Item, new_item_id
from mvllm_responses.mcp.functions import MCPFunction, MCPResult

_CALLS = ("function_call", "mcp_call", "mcp_approval_request")
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseEventEncoder:
    """Encodes and numbers the events of one stream."""

    def __init__(self) -> None:
        self._next = 0

    @property
    def num_events(self) -> int:
        """Events encoded so far, which is the number of the next one."""
        return self._next

    def encode(self, kind: str, **fields: Any) -> bytes:
        """An event with these fields."""
        return self.encode_raw(kind, encode_json(fields)[1:-1])

    def encode_raw(self, kind: str, fields: bytes) -> bytes:
        """An event whose fields are encoded already, without their braces."""
        name = kind.encode()
        number, self._next = self._next, self._next + 1
        return b'event: %s\ndata: {"type":"%s","sequence_number":%d,%s}\n\n' % (name, name, number, fields)


class OutputItems:
    """The items of one response, which has one turn of the model or more.

    Args:
        events: Encodes the events.

    Attributes:
        items: The items.
        functions: Functions of tool servers by their names for the model.
        namespaced: Namespace and name of the client's functions in namespaces, by their names for the model.
        pending_calls: The `mcp_call` items of the last turn, which the server has to run.
    """

    def __init__(self, events: ResponseEventEncoder) -> None:
        self.items: list[Item] = []
        self.functions: Mapping[str, MCPFunction] = {}
        self.namespaced: Mapping[str, tuple[str, str]] = {}
        self.pending_calls: list[Item] = []
        self._events = events
        self._open: Item | None = None  # the newest item, while more may come
        self._text: list[str] = []  # of the open item
        self._delta_prefix = b""  # fields of its deltas, up to the new text
        self._leading_space = ""  # of a message that may follow
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not become a delta
        self._logprobs_of_text: list[dict[str, Any]] = []  # of the open item
        self._call: int | None = None

    def append(self, deltas: Sequence[Delta], logprobs: Iterable[dict[str, Any]] = ()) -> bytes:
        """Adds deltas to the items; returns their events.

        Args:
            logprobs: The log-probabilities of the tokens since the last call, if the response has them. A message has
                those of the tokens of its text.
        """
        written = b""
        self._logprobs += logprobs
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                written += self._add_content(delta.text)
            elif isinstance(delta, ReasoningDelta):
                written += self._switch_to("reasoning") + self._add(delta.text)
            elif isinstance(delta, ToolCallDelta):
                if self._call != delta.index or self._kind not in _CALLS:
                    written += self._close("completed")
                    written += self._begin_call(delta)
                if delta.arguments:
                    written += self._add(delta.arguments)
            if not isinstance(delta, ContentDelta) and delta is deltas[-1]:
                self._logprobs = []
        return written

    def finish(self, status: str) -> bytes:
        """Closes the open item at the end of a turn; returns the events.

        Args:
            status: Of the open item: `completed` or `incomplete`.
        """
        written = b""
        if not self.items:  # an empty output is an empty message
            written = self._switch_to("message")
            if self._leading_space:
                written += self._add(self._leading_space)
        written += self._close(status)
        self._call, self._leading_space = None, ""
        return written

    def begin_list(self, label: str) -> bytes:
        """Adds an `mcp_list_tools` item, the last of `items`; returns its events."""
        item: Item = {"id": new_item_id("mcp_list_tools"), "type": "mcp_list_tools", "server_label": label, "tools": []}
        return self._add_item({**item, "error": None}) + self._progress(item["id"], "mcp_list_tools.in_progress")

    def finish_list(self, tools: list[Any], error: str | None) -> bytes:
        """Ends the last item, an `mcp_list_tools`; returns the events."""
        item = self.items[-1]
        item["tools"], item["error"] = tools, error
        end = "completed" if error is None else "failed"
        return self._progress(item["id"], f"mcp_list_tools.{end}") + self._done(item)

    def begin_approved_call(self, request: Item) -> bytes:
        """Adds the call of an approved `mcp_approval_request` to the pending calls; returns its events."""
        written = self._begin_mcp_call(request["server_label"], request["name"], request["id"])
        return written + self._add(request["arguments"]) + self._close("completed")

    def finish_call(self, item: Item, result: MCPResult | None) -> bytes:
        """Ends a pending call; returns the events.

        Args:
            result: None if the response has ended before the call.
        """
        self.pending_calls.remove(item)
        if result is None:
            item["status"] = "incomplete"
            return self._done(item)
        item["output"], item["error"] = result.output, result.error
        item["status"] = "completed" if result.error is None else "failed"
        return self._progress(item["id"], f"mcp_call.{item['status']}") + self._done(item)

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
        item: Item = {"id": new_item_id(kind), "type": kind, "status": "in_progress", "content": []}
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
        function = self.functions.get(delta.name or "")
        if function is not None and function.needs_approval:
            kind = "mcp_approval_request"  # added when it is complete: it has no events of its parts
            names = {"server_label": function.server_label, "name": function.name}
            self._open, self._text = {"id": new_item_id(kind), "type": kind, **names, "arguments": ""}, []
            return b""
        if function is not None:
            return self._begin_mcp_call(function.server_label, function.name)
        item: Item = {
            "id": new_item_id("function_call"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": delta.id,
            "name": delta.name,
            "arguments": "",
        }
        if (qualified := self.namespaced.get(delta.name or "")) is not None:
            item["namespace"], item["name"] = qualified
        written = self._open_item(item)
        self._set_delta_prefix(item)
        return written

    def _begin_mcp_call(self, server_label: str, name: str, approval_request_id: str | None = None) -> bytes:
        item: Item = {
            "id": new_item_id("mcp_call"),
            "type": "mcp_call",
            "status": "in_progress",
            "approval_request_id": approval_request_id,
            "server_label": server_label,
            "name": name,
            "arguments": "",
            "output": None,
            "error": None,
        }
        written = self._open_item(item) + self._progress(item["id"], "mcp_call.in_progress")
        self._set_delta_prefix(item)
        return written

    def _set_delta_prefix(self, item: Item) -> None:
        where = {"item_id": item["id"], "output_index": len(self.items) - 1}
        self._delta_prefix = encode_json(where)[1:-1] + b',"delta":'

    def _open_item(self, item: Item) -> bytes:
        self._open, self._text = item, []
        return self._add_item(item)

    def _add_item(self, item: Item) -> bytes:
        self.items.append(item)
        return self._events.encode("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _progress(self, item_id: str, kind: str) -> bytes:
        """An event that says only what an item does now."""
        index = next(i for i, item in enumerate(self.items) if item["id"] == item_id)
        return self._events.encode(f"response.{kind}", item_id=item_id, output_index=index)

    def _done(self, item: Item) -> bytes:
        index = next(i for i, each in enumerate(self.items) if each is item)
        return self._events.encode("response.output_item.done", output_index=index, item=item)

    def _add(self, text: str) -> bytes:
        self._text.append(text)
        fields = self._delta_prefix + encode_json(text)
        if self._kind == "message":
            if not self._logprobs:  # most calls
                return self._events.encode_raw("response.output_text.delta", fields + b',"logprobs":[]')
            logprobs = self._take_logprobs(text)
            self._logprobs_of_text += logprobs
            return self._events.encode_raw(
                "response.output_text.delta", fields + b',"logprobs":' + encode_json(logprobs)
            )
        if self._kind == "reasoning":
            return self._events.encode_raw("response.reasoning_text.delta", fields)
        if self._kind == "mcp_call":
            return self._events.encode_raw("response.mcp_call_arguments.delta", fields)
        if self._kind == "mcp_approval_request":
            return b""
        return self._events.encode_raw("response.function_call_arguments.delta", fields)

    def _take_logprobs(self, text: str) -> list[dict[str, Any]]:
        """The log-probabilities of the last tokens, as many as the text has bytes; those before are not of a text."""
        num_bytes, first = len(text.encode(errors="replace")), len(self._logprobs)
        while first > 0 and num_bytes > 0:
            first -= 1
            num_bytes -= len(self._logprobs[first]["bytes"])
        taken, self._logprobs = self._logprobs[first:], []
        return taken

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        events, kind, text = self._events, item["type"], "".join(self._text)
        if kind == "mcp_approval_request":
            if status != "completed":  # nobody could approve it
                return b""
            item["arguments"] = text
            return self._add_item(item) + self._done(item)
        index = len(self.items) - 1
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if kind == "function_call":
            item["arguments"] = text
            written = events.encode("response.function_call_arguments.done", **where, name=item["name"], arguments=text)
        elif kind == "mcp_call":
            item["arguments"] = text
            written = events.encode("response.mcp_call_arguments.done", **where, arguments=text)
            if status == "completed":
                self.pending_calls.append(item)
                return written
        else:
            where["content_index"] = 0
            logprobs, self._logprobs_of_text = self._logprobs_of_text, []
            more: dict[str, Any] = {"logprobs": logprobs} if kind == "message" else {}
            written = events.encode(f"response.{_PARTS[kind]}.done", **where, text=text, **more)
            item["content"] = [{**_part(kind, text), **more}]
            written += events.encode("response.content_part.done", **where, part=item["content"][0])
        item["status"] = status
        return written + events.encode("response.output_item.done", output_index=index, item=item)


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "message" else part
