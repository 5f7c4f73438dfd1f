"""A tool server (Model Context Protocol) for tests.

It talks over stdin and stdout; with a port as its argument it listens there.
"""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("cities", log_level="CRITICAL")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@server.tool()
def fail(city: str) -> str:
    """Always fails."""
    raise ValueError(f"no such city: {city}")


@server.tool()
def slow(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "done"


@server.tool()
def large(size: int) -> str:
    """Returns a long text."""
    return "x" * size


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
