"""Connections to tool servers, through the client of the package `mcp`.

The client's context must be entered and left by one task, so each connection has a task that holds it open.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from mvllm.extension_api import get_logger
from mvllm.extension_api.http import encode_json
from mvllm_responses.mcp.functions import MCPResult, MCPTool
from mvllm_responses.settings import MCPSettings

if TYPE_CHECKING:
    import mcp

logger = get_logger("mvllm.responses.mcp.connection")

_MAX_PAGES = 32
_MAX_LISTED_BYTES = 1 << 20
_PROTOCOL_ERROR = -32603
_TIMEOUT = -32001
_CONNECTION_CLOSED = -32000
INVALID_PARAMS = -32602
"""The code of an error of a call's arguments."""


class MCPServerError(Exception):
    """A tool server could not be used.

    Args:
        message: For the client and the model.
        error: The `error` of an `mcp_call` item.
    """

    def __init__(self, message: str, error: dict[str, Any]) -> None:
        super().__init__(message)
        self.error = error


class MCPConnection:
    """A connection to one tool server, made when it is first used, and again after it was lost.

    Args:
        tool: The server.
        settings: Limits.
    """

    def __init__(self, tool: MCPTool, settings: MCPSettings) -> None:
        self._tool = tool
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[mcp.Client] | None = None
        self._stop = asyncio.Event()

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools, as in an `mcp_list_tools` item.

        Raises:
            MCPServerError: The server cannot be reached, or its tools are too many.
        """
        tools: list[dict[str, Any]] = []
        async with self._use() as client:
            cursor: str | None = None
            for _ in range(_MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += [_listed(tool) for tool in page.tools]
                cursor = page.next_cursor
                if cursor is None:
                    break
        if len(encode_json(tools)) > _MAX_LISTED_BYTES:
            raise _protocol_error(f"The tools of the server need more than {_MAX_LISTED_BYTES} bytes.")
        return tools

    async def call(self, name: str, arguments: dict[str, Any], max_bytes: int) -> MCPResult:
        """Calls a tool. Errors of the tool and of the server are results, too.

        Args:
            max_bytes: Bytes of the result's text; the rest is cut off.
        """
        try:
            async with self._use() as client:
                result = await client.call_tool(name, arguments)
        except MCPServerError as e:
            return MCPResult(error=e.error)
        text = _cut(_text(result), max_bytes)
        if result.is_error:
            content = [{"type": "text", "text": text}]
            return MCPResult(error={"type": "mcp_tool_execution_error", "content": content})
        return MCPResult(output=text)

    def close(self) -> None:
        """Closes the connection, also while it starts. Idempotent."""
        self._stop.set()
        if self._task is not None and self._client is not None and not self._client.done():
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Waits until it is closed, after `close`."""
        if self._task is not None:
            await asyncio.wait([self._task])

    @contextlib.asynccontextmanager
    async def _use(self) -> AsyncIterator[mcp.Client]:
        """The client, which has a limited time to start or connect, and then for its use.

        Raises:
            MCPServerError: Anything went wrong.
        """
        from mcp import MCPError

        seconds = self._settings.timeout
        try:
            client = await self._start()
            async with asyncio.timeout(seconds):
                yield client
        except TimeoutError:
            raise _protocol_error(f"The MCP server has not answered within {seconds:g} s.", _TIMEOUT) from None
        except MCPError as e:
            if e.code == _CONNECTION_CLOSED:
                self._reset()
            raise _protocol_error(_short(e.message), e.code) from e
        except MCPServerError:
            raise
        except Exception as e:
            self._reset()
            raise _server_error(e) from e

    async def _start(self) -> mcp.Client:
        """The client, within the time limit for starts. A program that needs longer goes on starting."""
        seconds = self._settings.start_timeout
        try:
            async with asyncio.timeout(seconds):
                return await self._connected()
        except TimeoutError:
            raise _protocol_error(
                f"The MCP server has not started within {seconds:g} s. Try again, or start this server with a larger "
                "--mcp-start-timeout.",
                _TIMEOUT,
            ) from None

    async def _connected(self) -> mcp.Client:
        if self._client is None or (self._task is not None and self._task.done()):
            self._stop = asyncio.Event()
            self._client = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._client, self._stop))
        return await asyncio.shield(self._client)

    def _reset(self) -> None:
        """Makes the next use connect again."""
        self._stop.set()
        self._client = None

    async def _hold(self, connected: asyncio.Future[mcp.Client], stop: asyncio.Event) -> None:
        """Holds the client open until `stop` is set."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await self._open(stack)
                if not connected.done():
                    connected.set_result(client)
                await stop.wait()
        except BaseException as e:
            if not connected.done():
                connected.set_exception(e if isinstance(e, Exception) else ConnectionError("The server is ending."))
                connected.exception()  # it may have no reader
            elif isinstance(e, Exception):
                logger.warning("The connection to the MCP server %s ended: %s", self._tool.label, _short(str(e)))
            if not isinstance(e, Exception):
                raise

    async def _open(self, stack: contextlib.AsyncExitStack) -> mcp.Client:
        await asyncio.to_thread(_import_client)  # takes a second
        import httpx2
        import mcp
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        from mvllm_responses.mcp.transport import ToolServerTransport

        server, seconds = self._tool.server, max(self._settings.timeout, self._settings.start_timeout)
        transport: Any
        if server.url is None:
            program = mcp.StdioServerParameters(command=server.command[0], args=list(server.command[1:]))
            # What the program writes to stderr goes to the server's. The client's default is the `sys.stderr` of its
            # import, which may be closed by now.
            transport = stdio_client(program, errlog=sys.__stderr__ or sys.stderr)
        else:
            public_only = not self._tool.is_operators and self._settings.request_urls != "any"
            http = httpx2.AsyncClient(
                headers=self._tool.headers,
                timeout=seconds,
                transport=ToolServerTransport(public_only=public_only),
                trust_env=False,
            )
            transport = streamable_http_client(server.url, http_client=await stack.enter_async_context(http))
        return await stack.enter_async_context(mcp.Client(transport, read_timeout_seconds=seconds))


def _import_client() -> None:
    import mcp  # noqa: F401


def _listed(tool: Any) -> dict[str, Any]:
    annotations = None if tool.annotations is None else tool.annotations.model_dump(by_alias=True, exclude_none=True)
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": annotations,
    }


def _text(result: Any) -> str:
    """The text of a result. Parts without text are named."""
    texts = []
    for part in result.content:
        if part.type == "text":
            texts.append(part.text)
        elif part.type == "resource" and hasattr(part.resource, "text"):
            texts.append(part.resource.text)
        elif part.type == "resource_link":
            texts.append(f"[resource {part.uri}]")
        else:
            texts.append(f"[{part.type} that is not shown]")
    if not texts and result.structured_content is not None:
        texts.append(encode_json(result.structured_content).decode())
    return "\n".join(texts)


def _cut(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    return encoded[:max_bytes].decode(errors="ignore") + f"\n[cut off: {max_bytes} of {len(encoded)} bytes]"


def _server_error(error: Exception) -> MCPServerError:
    """The error for an exception of the client, whose groups have one cause."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, OSError) and error.errno is not None:
        return _protocol_error(f"The MCP server cannot be started or reached: {error.strerror}.")
    response = getattr(error, "response", None)
    message = _short(str(error)) or type(error).__name__
    if response is not None:
        return MCPServerError(message, {"type": "http_error", "code": response.status_code, "message": message})
    return _protocol_error(message)


def _protocol_error(message: str, code: int = _PROTOCOL_ERROR) -> MCPServerError:
    return MCPServerError(message, {"type": "mcp_protocol_error", "code": code, "message": message})


def _short(text: str) -> str:
    return text[:500]
