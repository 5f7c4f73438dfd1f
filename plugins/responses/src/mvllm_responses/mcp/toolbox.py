"""The tool servers of an API server, and those that one response uses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mvllm.extension_api import RequestError
from mvllm_responses.client_functions import client_functions
from mvllm_responses.client_functions import function_names as client_function_names
from mvllm_responses.items import Item
from mvllm_responses.mcp.connection import INVALID_PARAMS, MCPConnection, MCPServerError
from mvllm_responses.mcp.functions import (
    MCPFunction,
    MCPResult,
    MCPTool,
    function_names,
    parse_mcp_tools,
)
from mvllm_responses.settings import MCPSettings


class MCPServers:
    """The tool servers of one API server.

    A program is started when it is first used and is shared by all responses. A URL has a connection per response,
    because requests bring headers of their own.

    Args:
        settings: Which servers are allowed, and limits.
    """

    def __init__(self, settings: MCPSettings) -> None:
        self.settings = settings
        self._shared: dict[str, MCPConnection] = {}

    def toolbox(self, tools: Sequence[Mapping[str, Any]] | None) -> MCPToolbox | None:
        """The tool servers among the tools of a request; None if there are none.

        Raises:
            RequestError: One is not valid, or not allowed.
        """
        servers = parse_mcp_tools(tools, self.settings)
        if not servers:
            return None
        return MCPToolbox(self, servers, client_function_names(client_functions(tools)[0]))

    def connect(self, tool: MCPTool) -> tuple[MCPConnection, bool]:
        """A connection, and whether it is for one response only, which closes it."""
        if tool.server.url is not None:
            return MCPConnection(tool, self.settings), True
        return self._shared.setdefault(tool.label, MCPConnection(tool, self.settings)), False

    async def close(self) -> None:
        """Ends the programs."""
        for connection in self._shared.values():
            connection.close()
        await asyncio.gather(*(connection.wait_closed() for connection in self._shared.values()))


class MCPToolbox:
    """The tool servers of one response. To be closed.

    Args:
        servers: Of the API server.
        tools: Those that the request names.
        function_names: Names of the functions that the client runs.

    Attributes:
        tools: Those that the request names.
        functions: Functions of the servers whose tools are known, by their names for the model.
        chat_tools: The same as tools of a chat completion.
        is_ready: Whether `add_listed` has been called.
        max_calls: Calls that a response may make.
        max_result_bytes: Bytes of a result.
    """

    def __init__(self, servers: MCPServers, tools: Sequence[MCPTool], function_names: Sequence[str]) -> None:
        self.tools = tools
        self.functions: dict[str, MCPFunction] = {}
        self.chat_tools: list[dict[str, Any]] = []
        self.is_ready = False
        self.max_calls = servers.settings.max_calls
        self.max_result_bytes = servers.settings.max_result_bytes
        self._servers = servers
        self._taken_names = function_names
        self._connections: dict[str, tuple[MCPConnection, bool]] = {}

    async def list_tools(self, tool: MCPTool) -> tuple[list[dict[str, Any]], str | None]:
        """The tools of a server that the model may call, and an error if they cannot be listed."""
        try:
            listed = await self._connection(tool).list_tools()
        except MCPServerError as e:
            return [], str(e)
        return [each for each in listed if tool.allowed.matches(each)], None

    def add_listed(self, listed: Mapping[str, Item]) -> None:
        """Makes functions of the tools in `mcp_list_tools` items, by server label."""
        self.is_ready = True
        found: list[tuple[MCPTool, Mapping[str, Any]]] = []
        for tool in self.tools:
            tools = listed.get(tool.label, {}).get("tools")
            for each in tools if isinstance(tools, list) else ():
                if isinstance(each, Mapping) and isinstance(each.get("name"), str) and tool.allowed.matches(each):
                    found.append((tool, each))
        names = function_names([(tool.label, each["name"]) for tool, each in found], self._taken_names)
        for name, (tool, each) in zip(names, found, strict=True):
            self.functions[name] = MCPFunction(tool.label, each["name"], tool.needs_approval(each))
            schema, description = each.get("input_schema"), each.get("description")
            function: dict[str, Any] = {
                "name": name,
                "parameters": schema if isinstance(schema, Mapping) else {"type": "object", "properties": {}},
            }
            if isinstance(description, str):
                function["description"] = description
            self.chat_tools.append({"type": "function", "function": function})

    def tool_choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """A tool choice of the Responses API in which a tool of a server is a function.

        Raises:
            RequestError: No server has the tool.
        """
        if not isinstance(choice, dict) or choice.get("type") != "mcp":
            return choice
        for name, function in self.functions.items():
            if function.server_label == choice.get("server_label") and function.name == choice.get("name"):
                return {"type": "function", "name": name}
        raise RequestError(
            "tool_choice of type mcp must have the server_label of an MCP server among the tools, and the name of one "
            "of its allowed tools.",
            parameter="tool_choice",
        )

    async def call(self, item: Item) -> MCPResult:
        """Runs the call of an `mcp_call` item."""
        label, name = item["server_label"], item["name"]
        tool = next((each for each in self.tools if each.label == label), None)
        if tool is None:
            return _refused(f"The request has no MCP server {label!r} among its tools.")
        if not any(each.server_label == label and each.name == name for each in self.functions.values()):
            return _refused(f"{name!r} is not an allowed tool of the MCP server {label!r}.")
        try:
            arguments = msgspec.json.decode(item["arguments"] or "{}")
        except (msgspec.DecodeError, RecursionError, ValueError) as e:
            return _refused(f"The arguments are not JSON: {e}.")
        if not isinstance(arguments, dict):
            return _refused(f"The arguments must be a JSON object, not {json.dumps(arguments)[:60]}.")
        return await self._connection(tool).call(name, arguments, self.max_result_bytes)

    def close(self) -> None:
        """Closes the connections of this response. Idempotent."""
        for connection, is_own in self._connections.values():
            if is_own:
                connection.close()

    def _connection(self, tool: MCPTool) -> MCPConnection:
        if tool.label not in self._connections:
            self._connections[tool.label] = self._servers.connect(tool)
        return self._connections[tool.label][0]


def _refused(message: str) -> MCPResult:
    return MCPResult(error={"type": "mcp_protocol_error", "code": INVALID_PARAMS, "message": message})
