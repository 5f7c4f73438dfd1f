"""Tools and tool choices of the Anthropic Messages API, in the format of chat completions.

The server runs no tools. So a tool has a schema and is run by the client; tools that the service itself would run, and
those whose schema only its own models know, are refused by their type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mvllm.extension_api import RequestError
from mvllm.extension_api.http import check_tools

_CLIENT_TOOLS = ("bash_", "text_editor_", "memory_", "computer_", "browser_")
"""Beginnings of the types of tools that clients run, and whose schema requests do not have."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as functions.

    Raises:
        RequestError: A tool is not valid, or is one that this server does not have.
    """
    check_tools(tools)
    return [_function(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def chat_tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """The tool choice, and whether several calls are allowed.

    Raises:
        RequestError: It is not valid.
    """
    if choice is None:
        return None, True
    kind, is_single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if not isinstance(is_single, bool | None):
        raise RequestError(
            "tool_choice.disable_parallel_tool_use must be true or false.",
            parameter="tool_choice",
        )
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind], not is_single
    name = choice.get("name")
    if kind != "tool" or not isinstance(name, str):
        raise RequestError(
            'tool_choice must be {"type": "auto"}, {"type": "any"}, {"type": "none"} or {"type": "tool", "name": ...}.',
            parameter="tool_choice",
        )
    return {"type": "function", "function": {"name": name}}, not is_single


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in (None, "custom"):
        shown = ascii(kind)[:60]
        if isinstance(kind, str) and kind.startswith(_CLIENT_TOOLS):
            raise RequestError(
                f"{where} has the type {shown}, whose schema the request does not have, so this server's model does "
                "not know it. Send the tool with a name and an input_schema instead.",
                parameter="tools",
            )
        raise RequestError(
            f"{where} has the type {shown}; this server runs no tools itself. Send tools that the client runs, each "
            "with a name and an input_schema.",
            parameter="tools",
        )
    if not isinstance(name, str):
        raise RequestError(f"{where}.name must be a text.", parameter="tools")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError(f"{where}.input_schema must be a JSON schema, an object.", parameter="tools")
    function = {"name": name, "parameters": schema}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}
