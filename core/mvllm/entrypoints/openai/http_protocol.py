"""HTTP/1.1 over one connection, within limits: how long a head may be, and how long it may take.

uvicorn's protocol on httptools, which is fast and has no such limits of its own. What it refuses is answered in the
shape of every other error.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mvllm.entrypoints.openai.errors import error_body

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
HEAD_SECONDS = 20.0
"""From the connection, or the first byte of a later request on it, to the end of the request's headers."""
_LINGER_SECONDS = 2.0


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0  # received, whether or not they are whole fields
    _field_bytes = 0  # of the fields of the head
    _in_head = True
    _unused_bytes = 0  # received since the last piece of a body: extensions of chunks, fields after the last one
    _is_closing = False
    _refusal: tuple[int, str] | None = None
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cycles: list[RequestResponseCycle] = []  # not answered to the end; all but the first wait for it
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        self._unused_bytes += len(data)
        super().data_received(data)
        if self._is_closing or self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
            self.send_400_response("")
        elif not self._in_head and self._unused_bytes > MAX_HEAD_BYTES:
            self._refuse_tail()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._field_bytes = self._unused_bytes = 0
        self.scope["mvllm.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._end_head()
        self._unused_bytes = 0
        before = self.cycle
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.cycle is not None and self.cycle is not before:
            self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request, and closes the connection."""
        self._end_head()
        cycle = self.cycle
        if any(each.response_started and not each.response_complete for each in self._cycles):
            self.transport.close()  # an answer is under way; this one would land inside it
            return
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # it was waiting for the rest of its body
            cycle.message_event.set()
        status, text = self._refusal or (400, "This is not a valid HTTP/1.1 request.")
        body = error_body(status, text)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self._close_gently()

    def _close_gently(self) -> None:
        """Closes the connection when the client has had time to read the answer.

        A connection that is closed while bytes are unread is reset, and the answer may be lost with it.
        """
        self._is_closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # the request is answered as if it had not asked

    def _count(self, num_bytes: int) -> None:
        self._field_bytes += num_bytes
        if self._field_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
            raise httptools.HttpParserError("the head is too long")

    def _refuse_head(self) -> None:
        self._refusal = (431, f"Headers may have {MAX_HEAD_BYTES} bytes, and there may be {MAX_HEADERS} of them.")

    def _refuse_tail(self) -> None:
        """What a chunked body has beside its data grows without an end; the parser would keep all of it."""
        if self.cycle is not None and self.cycle.response_complete:
            self.transport.close()  # another answer would be taken for that to the next request
            return
        self._refuse_head()
        self.send_400_response("")

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._in_head, self._head_bytes = True, 0
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()


def protocol_settings() -> dict[str, Any]:
    """What uvicorn is to be told so that it uses this protocol and adds nothing of its own."""
    return {
        "http": LimitedHttpProtocol,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": 60,
    }
