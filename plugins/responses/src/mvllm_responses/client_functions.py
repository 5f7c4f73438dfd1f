"""Functions that the client runs: the tools `function` and `namespace` of the Responses API.

    {"type": "namespace", "name": "crm", "description": ..., "tools": [{"type": "function", "name": "find", ...}]}
                    model                       API
    crm__find   {"name": "crm__find", ...}      {"type": "function_call", "namespace": "crm", "name": "find", ...}

Chat templates know no namespaces, so that the model sees each function under its qualified name. It depends on nothing
but the two names: calls of earlier turns have the same name, whatever tools the request has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mvllm.extension_api import RequestError

_SEPARATOR = "__"
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,128}")
_KINDS = ("function", "namespace", "mcp")
_FUNCTION_FIELDS = ("description", "parameters", "strict")
"""Fields of a function in a namespace that the model gets. Others, such as `defer_loading`, have no effect."""


def qualified_name(namespace: str, name: str) -> str:
    """The name of a function in a namespace, as the model knows it."""
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def client_functions(
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """The functions among the tools of a request. Those of tool servers (`mcp`) are left out, and so are kinds of tools
    that this server does not know (`unknown_tools`).

    Returns:
        The tools of the equivalent chat completion; and namespace and name of the functions in namespaces, by their
        qualified names.

    Raises:
        RequestError: A namespace is not valid, or two functions have one name.
    """
    found: list[dict[str, Any]] = []
    namespaced: dict[str, tuple[str, str]] = {}
    for i, tool in enumerate(tools or ()):
        match _kind(tool):
            case "function":
                found.append(_chat_tool((key, value) for key, value in tool.items() if key != "type"))
            case "namespace":
                for namespace, name, function in _functions_in(f"tools[{i}]", tool):
                    found.append(function)
                    namespaced[function["function"]["name"]] = namespace, name
    counts = Counter(function_names(found))
    if doubled := next((name for name in namespaced if counts[name] > 1), None):
        raise _error(f"tools has two functions that the model would know as {doubled!r}. Rename one of them.")
    return found, namespaced


def unknown_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """The kinds of tools of a request that this server does not know, as paths of unknown fields: services that would
    run the tool (`web_search`), and formats that only some models write (`custom`, `local_shell`). Agents send them
    beside functions, and do without them."""
    found: list[str] = []
    for tool in tools or ():
        inner = tool.get("tools") if _kind(tool) == "namespace" else None
        members = [each for each in inner if isinstance(each, Mapping)] if isinstance(inner, list) else []
        kinds = [_kind(tool), *(kind for each in members if (kind := _kind(each)) != "function")]
        found += [f"tools.{kind}" for kind in kinds if kind not in _KINDS]
    return list(dict.fromkeys(found))


def _kind(tool: Mapping[str, Any]) -> str:
    """The type of a tool. One with a name and without a type is a function."""
    kind = tool.get("type")
    if kind is None and isinstance(tool.get("name"), str):
        return "function"
    return kind if isinstance(kind, str) else ""


def function_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names in tools of a chat completion, whose functions have not been checked yet."""
    names = [tool["function"].get("name") for tool in tools]
    return [name for name in names if isinstance(name, str)]


def _functions_in(where: str, tool: Mapping[str, Any]) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """Namespace, name, and tool of a chat completion of each function."""
    namespace, inner, about = tool.get("name"), tool.get("tools"), tool.get("description")
    if not isinstance(namespace, str) or not _NAME.fullmatch(namespace):
        raise _error(f"{where}.name must be 1 to 128 letters, digits, '_' or '-'.")
    if not isinstance(inner, list) or not all(isinstance(each, Mapping) for each in inner):
        raise _error(f"{where}.tools must be a list of functions.")
    functions = [(i, each) for i, each in enumerate(inner) if _kind(each) == "function"]
    for i, each in functions:
        name = each.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _error(f"{where}.tools[{i}].name must be 1 to 128 letters, digits, '_' or '-'.")
        function = {"name": qualified_name(namespace, name)}
        function |= {key: each[key] for key in _FUNCTION_FIELDS if each.get(key) is not None}
        if each is functions[0][1] and isinstance(about, str) and about:  # once: templates have no other place for it
            function["description"] = f"{about}\n\n{function.get('description', '')}".rstrip()
        yield namespace, name, _chat_tool(function.items())


def _chat_tool(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A function in the format of chat completions, where it is an object within the tool."""
    return {"type": "function", "function": dict(fields)}


def _error(message: str) -> RequestError:
    return RequestError(message, parameter="tools")
