"""MCP tools of a request: which tools of a server the model may call, and which calls need the client's approval.

{"type": "mcp", "server_label": "docs", "server_url": ..., "headers": {...}, "authorization": ...,
 "allowed_tools": ["search"] or {"tool_names": [...], "read_only": true},
 "require_approval": "always", "never" or {"always": {filter}, "never": {filter}}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mvllm.extension_api import RequestError
from mvllm_responses.settings import MCPServerConfig, MCPSettings

_LABEL = re.compile(r"[A-Za-z0-9_\-]{1,64}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~\-]{1,128}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\x80-\xff]{0,8192}")
_FORBIDDEN_HEADERS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "accept-encoding"}
)
_MAX_HEADERS = 32
_MAX_URL = 2048
_NOT_SUPPORTED = ("connector_id", "tunnel_id")
MAX_SERVERS = 32
"""Tool servers of one request."""


@dataclass(frozen=True)
class MCPFunction:
    """A tool of a tool server, which the model sees as a function.

    Attributes:
        server_label: The server.
        name: The tool's name there.
        needs_approval: Whether the client has to approve its calls.
    """

    server_label: str
    name: str
    needs_approval: bool


@dataclass(frozen=True)
class MCPResult:
    """The result of a call.

    Attributes:
        output: Its text; None for an error.
        error: The `error` of an `mcp_call` item; None without an error.
    """

    output: str | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class ToolFilter:
    """A filter of tools; a tool must match every condition that is given.

    Attributes:
        names: Names of tools; None for all.
        read_only: Whether tools must have, or must not have, the annotation `readOnlyHint`; None for either.
    """

    names: frozenset[str] | None = None
    read_only: bool | None = None

    def matches(self, tool: Mapping[str, Any]) -> bool:
        """Whether a tool of an `mcp_list_tools` item matches."""
        if self.names is not None and tool.get("name") not in self.names:
            return False
        annotations = tool.get("annotations")
        hint = isinstance(annotations, Mapping) and annotations.get("readOnlyHint") is True
        return self.read_only is None or self.read_only == hint


@dataclass(frozen=True)
class MCPTool:
    """A tool server that a request names.

    Attributes:
        server: The server; one that the operator allows, or one by the request's URL.
        is_operators: Whether the operator allows the server by its label.
        headers: HTTP headers for the server. They are secrets of the client, and stored nowhere.
        allowed: The tools that the model may call.
        always, never: The tools whose calls need approval, and those whose calls do not; None if not given.
    """

    server: MCPServerConfig
    is_operators: bool
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    allowed: ToolFilter = field(default_factory=ToolFilter)
    always: ToolFilter | None = None
    never: ToolFilter | None = None

    @property
    def label(self) -> str:
        """The label of the server."""
        return self.server.label

    def needs_approval(self, tool: Mapping[str, Any]) -> bool:
        """Whether calls of a tool need approval. They do unless the request says that they do not."""
        if self.never is not None and self.never.matches(tool):
            return False
        return self.always is None or self.never is not None or self.always.matches(tool)


def parse_mcp_tools(tools: Sequence[Mapping[str, Any]] | None, settings: MCPSettings) -> list[MCPTool]:
    """The tool servers among the tools of a request.

    Raises:
        RequestError: One is not valid, or not allowed on this server.
    """
    found = [_parse(f"tools[{i}]", tool, settings) for i, tool in enumerate(tools or ()) if tool.get("type") == "mcp"]
    labels = [tool.label for tool in found]
    if len(set(labels)) < len(labels):
        raise _error("tools: each MCP server needs a server_label of its own.")
    if len(found) > MAX_SERVERS:
        raise _error(f"tools may have {MAX_SERVERS} MCP servers.")
    return found


def redacted_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """The tools as a response repeats them: without the secrets of MCP servers, and functions with all their fields."""
    return [_redacted(tool) if tool.get("type") == "mcp" else _shown(tool) for tool in tools or ()]


def _shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if (tool.get("type") or "function") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool, "type": "function"}


def _redacted(tool: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in tool.items() if key not in ("headers", "authorization")}
    if isinstance(url := shown.get("server_url"), str):
        parts = urlsplit(url)
        shown["server_url"] = f"{parts.scheme}://{parts.netloc}/<redacted>"
    return {"require_approval": "always", "allowed_tools": None, **shown}


def _parse(where: str, tool: Mapping[str, Any], settings: MCPSettings) -> MCPTool:
    if not settings.is_enabled:
        raise _error(f"{where} has the type 'mcp', but this server uses no MCP servers: start it with --mcp-server.")
    for name in _NOT_SUPPORTED:
        if tool.get(name) is not None:
            raise _error(f"{where}.{name} is not supported: name a server by server_label and server_url.")
    server, is_operators = _server(where, tool, settings)
    headers = _headers(where, tool)
    if headers and server.url is None:
        raise _error(f"{where}: the MCP server {server.label!r} is a program, which has no headers or authorization.")
    always, never = _approval(where, tool.get("require_approval"))
    allowed = _filter(f"{where}.allowed_tools", tool.get("allowed_tools")) or ToolFilter()
    return MCPTool(server, is_operators, headers, allowed, always, never)


def _server(where: str, tool: Mapping[str, Any], settings: MCPSettings) -> tuple[MCPServerConfig, bool]:
    label, url = tool.get("server_label"), tool.get("server_url")
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise _error(f"{where}.server_label must be 1 to 64 letters, digits, '_' or '-'.")
    if not isinstance(url, str | None):
        raise _error(f"{where}.server_url must be a text.")
    for server in settings.servers:
        if server.label == label:
            if url is not None and url != server.url:
                raise _error(f"{where}.server_url is not the URL of the MCP server {label!r} here; leave it out.")
            return server, True
    if url is None or settings.request_urls == "none":
        labels = ", ".join(repr(server.label) for server in settings.servers) or "none"
        more = "" if settings.request_urls == "none" else " Or give its server_url."
        raise _error(
            f"{where}.server_label {label!r} is not an MCP server that this server allows. Allowed are: {labels}.{more}"
        )
    parts = urlsplit(url) if len(url) <= _MAX_URL and url.isascii() and url.isprintable() else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise _error(f"{where}.server_url must be an http or https URL without a user name.")
    return MCPServerConfig(label, url), False


def _headers(where: str, tool: Mapping[str, Any]) -> dict[str, str]:
    given, token = tool.get("headers") or {}, tool.get("authorization")
    if not isinstance(given, Mapping) or len(given) > _MAX_HEADERS:
        raise _error(f"{where}.headers must be an object with up to {_MAX_HEADERS} texts.")
    headers = dict(given)
    if token is not None:
        if any(name.lower() == "authorization" for name in headers):
            raise _error(f"{where} has both authorization and the header Authorization; send one of them.")
        headers["Authorization"] = f"Bearer {token}" if isinstance(token, str) else token
    for name, value in headers.items():
        is_name = _HEADER_NAME.fullmatch(name) and name.lower() not in _FORBIDDEN_HEADERS
        if not is_name or not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise _error(f"{where}.headers: {ascii(name)[:60]} is not allowed, or its value is no header value.")
    return headers


def _approval(where: str, policy: object) -> tuple[ToolFilter | None, ToolFilter | None]:
    """The filters `always` and `never`."""
    if policy is None or policy == "always":
        return ToolFilter(), None
    if policy == "never":
        return None, ToolFilter()
    where = f"{where}.require_approval"
    if not isinstance(policy, Mapping) or not policy or set(policy) - {"always", "never"}:
        raise _error(f"{where} must be 'always', 'never', or an object with filters under these names.")
    return _filter(f"{where}.always", policy.get("always")), _filter(f"{where}.never", policy.get("never"))


def _filter(where: str, value: object) -> ToolFilter | None:
    if value is None:
        return None
    given: Mapping[str, Any] = {"tool_names": value} if isinstance(value, list) else _mapping(where, value)
    names, read_only = given.get("tool_names"), given.get("read_only")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _error(f"{where}: the names of tools must be a list of texts.")
    if not isinstance(read_only, bool | None):
        raise _error(f"{where}.read_only must be true or false.")
    return ToolFilter(None if names is None else frozenset(names), read_only)


def _mapping(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or set(value) - {"tool_names", "read_only"}:
        raise _error(f"{where} must be a list of names, or an object with tool_names and read_only.")
    return value


def function_names(names: Sequence[tuple[str, str]], taken: Sequence[str]) -> Iterator[str]:
    """Names of functions for the model: the tool's own, or with the server's label before it if it would not be unique.

    Args:
        names: Server label and tool name of each.
        taken: Names of other functions.
    """
    plain = [re.sub(r"[^A-Za-z0-9_\-]", "_", name)[:64] or "_" for _, name in names]
    used = set(taken)
    for (label, _), name in zip(names, plain, strict=True):
        unique = name if plain.count(name) == 1 and name not in used else f"{label}__{name}"[:128]
        number = 2
        while unique in used:
            unique, number = f"{label}__{name}"[:120] + f"_{number}", number + 1
        used.add(unique)
        yield unique


def _error(message: str) -> RequestError:
    return RequestError(message, parameter="tools")
