"""Items of the Responses API, as they are stored: with an id, and content in parts.

"text"                                  a message of the user
{"role": "user", "content": "text"}     {"id": "msg_...", "type": "message", "content": [{"type": "input_text", ...
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mvllm.extension_api import RequestError
from mvllm.extension_api.http import encode_json

Item = dict[str, Any]

MAX_ITEMS = 1 << 16
"""Items of an input."""

MAX_METADATA = (16, 64, 512)
"""Entries of `metadata`, characters of a name, and characters of a value, as in the OpenAI API."""

ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "mcp_list_tools": "mcpl_",
    "mcp_call": "mcp_",
    "mcp_approval_request": "mcpr_",
    "mcp_approval_response": "mcpa_",
}
"""The types of items, and how their ids begin."""

_ID = re.compile(r"[A-Za-z0-9_\-]{1,64}")
_WITH_STATUS = ("message", "function_call", "function_call_output")


def new_item_id(kind: str) -> str:
    """An id for an item of this type."""
    return f"{ID_PREFIXES[kind]}{uuid.uuid4().hex}"


def input_items(
    value: str | Sequence[Mapping[str, Any]] | None, parameter: str = "input", *, may_be_empty: bool = False
) -> list[Item]:
    """The items of `input` as they are stored. Their types are checked, their fields are not.

    Args:
        may_be_empty: Whether there may be none, because there is something else to answer.

    Raises:
        RequestError: The input is missing, or an item has an unknown type.
    """
    if not value and may_be_empty:
        return []
    if value is None:
        raise RequestError(f"{parameter} is missing.", parameter=parameter)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not value:
        raise RequestError(f"{parameter} is an empty list.", parameter=parameter)
    if len(value) > MAX_ITEMS:
        raise RequestError(f"{parameter} may have {MAX_ITEMS} items; found {len(value)}.", parameter=parameter)
    return [_normalized(f"{parameter}[{i}]", parameter, item) for i, item in enumerate(value)]


def encode_items(items: Iterable[Item]) -> list[tuple[str, bytes]]:
    """The id and the JSON of each item."""
    return [(item["id"], encode_json(item)) for item in items]


def page_of(items: Sequence[Item], *, has_more: bool) -> dict[str, Any]:
    """A page of items, as the API lists them."""
    ids = [item["id"] for item in items]
    return {
        "object": "list",
        "data": list(items),
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Checks the size of `metadata`.

    Raises:
        RequestError: It has too many entries, or one that is too long.
    """
    given = metadata or {}
    max_entries, max_name, max_value = MAX_METADATA
    lengths = len(given), max(map(len, given), default=0), max(map(len, given.values()), default=0)
    if lengths[0] > max_entries or lengths[1] > max_name or lengths[2] > max_value:
        raise RequestError(
            f"metadata may have {max_entries} entries, with names of {max_name} characters and values of {max_value}.",
            parameter="metadata",
        )


def _normalized(where: str, parameter: str, item: Mapping[str, Any]) -> Item:
    kind = item.get("type") or "message"
    if kind not in ID_PREFIXES:
        raise RequestError(
            f"{where} has the type {ascii(kind)[:60]}; allowed are {', '.join(ID_PREFIXES)}.", parameter=parameter
        )
    item_id = item.get("id")
    is_id = isinstance(item_id, str) and _ID.fullmatch(item_id) is not None
    stored: Item = {"id": item_id if is_id else new_item_id(kind), **{k: v for k, v in item.items() if k != "id"}}
    stored["type"] = kind
    if kind in _WITH_STATUS:
        stored.setdefault("status", "completed")
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        is_assistant = item.get("role") == "assistant"
        part: dict[str, Any] = {"type": "output_text" if is_assistant else "input_text", "text": content}
        stored["content"] = [{**part, "annotations": [], "logprobs": []} if is_assistant else part]
    if kind == "reasoning":
        stored.setdefault("summary", [])
    return stored
