"""An OpenAI-compatible HTTP server with scripted responses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass
class Request:
    """A received request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Answer:
    """A scripted response.

    Attributes:
        parts: Bytes to send, seconds to wait, or something to await.
        status: 200 makes a stream; anything else has the parts as its body.
        cut: Close the connection after the last part, without an end.
    """

    parts: Iterable[bytes | float | Callable[[], Any]] = ()
    status: int = 200
    cut: bool = False


def event(**fields: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def completion(text: str, finish_reason: str | None = None) -> bytes:
    """A chunk of a completion."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}], usage=None)


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The chunk with the token counts."""
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


@dataclass
class SSEServer:
    """Responds to every POST with the answer of `script`. A context manager; runs in a thread.

    Attributes:
        script: Maps a request, and its index among all requests, to the answer.
        requests: All received requests.
        most_at_once: Maximum number of concurrent POSTs.
        url: Base URL.
    """

    script: Callable[[Request, int], Answer]
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""

    def __enter__(self) -> SSEServer:
        self._active = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Responds to one request; returns whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            models = json.dumps({"object": "list", "data": [{"id": "model-of-the-server"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
            return True
        request = Request(path, headers, json.loads(body))
        self.requests.append(request)
        self._active += 1
        self.most_at_once = max(self.most_at_once, self._active)
        try:
            answer = self.script(request, len(self.requests) - 1)
            if answer.status != 200:
                said = b"".join(part for part in answer.parts if isinstance(part, bytes))
                writer.write(b"HTTP/1.1 %d Sorry\r\nContent-Length: %d\r\n\r\n%b" % (answer.status, len(said), said))
                return True
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for part in answer.parts:
                if isinstance(part, bytes):
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                    await writer.drain()
                elif callable(part):
                    await part()
                else:
                    await asyncio.sleep(part)
            if answer.cut:
                return False
        finally:
            self._active -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
