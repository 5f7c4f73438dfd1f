"""The settings of stored responses and of tool servers."""

from __future__ import annotations

from typing import Literal

import msgspec

NAME = "responses"
"""The plugin's name."""

MCPRequestURLs = Literal["none", "public", "any"]
"""Which URLs of tool servers requests may give: none, those of public addresses, or any."""


class MCPServerConfig(msgspec.Struct, frozen=True):
    """A tool server (Model Context Protocol) that the operator allows.

    Attributes:
        label: Its name in requests.
        url: Its URL, for the transport Streamable HTTP; None for a command.
        command: The program that is started and talks over stdin and stdout, with its arguments.
    """

    label: str
    url: str | None = None
    command: tuple[str, ...] = ()


class MCPSettings(msgspec.Struct, frozen=True):
    """The tool servers that responses may use, and limits of their calls.

    Attributes:
        servers: Servers that requests name by their label.
        request_urls: Which other servers requests may name by URL.
        max_calls: Most calls of one response.
        start_timeout: Seconds for the start of a program, or for connecting to a URL.
        timeout: Seconds for each call.
        max_result_bytes: Bytes of a result that the model sees; the rest is cut off.
    """

    servers: tuple[MCPServerConfig, ...] = ()
    request_urls: MCPRequestURLs = "none"
    max_calls: int = 32
    timeout: float = 60.0
    max_result_bytes: int = 128 << 10
    start_timeout: float = 10.0

    @property
    def is_enabled(self) -> bool:
        """Whether requests may use any server."""
        return bool(self.servers) or self.request_urls != "none"


class ResponsesSettings(msgspec.Struct, frozen=True):
    """The settings of `/v1/responses`.

    Attributes:
        responses_store: File that stores responses and conversations; None stores them in memory.
        max_stored_responses: Responses and conversations to store; 0 for none.
        max_stored_bytes: Bytes of all of them together.
        max_stored_seconds: Seconds after their last use when they are deleted; None for never.
        mcp: Tool servers that responses may use.
    """

    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 << 20
    responses_store: str | None = None
    max_stored_seconds: float | None = None
    mcp: MCPSettings = MCPSettings()
