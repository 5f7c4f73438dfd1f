"""HTTP/1.1 over one connection, within limits: how long a head may be, how long it may take, and how many requests may
wait for their answers.

uvicorn's protocol on httptools, which is fast and has no such limits of its own. What it refuses is answered in the
shape of every other error.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mvllm.entrypoints.openai.common.errors import error_body
from mvllm.entrypoints.openai.common.streaming_response import RequestConnection
from mvllm.entrypoints.openai.server.connections import ConnectionTable
from mvllm.entrypoints.openai.server.middleware import UNAUTHENTICATED_PATHS

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
MAX_PIPELINED_REQUESTS = 32
"""Requests on one connection that wait for their answers. One more ends the connection."""
HEAD_SECONDS = 20.0
"""From the connection, or the first byte of a later request on it, to the end of the request's headers; and for the
rest of a body whose request has been answered already."""
STALL_SECONDS = 60.0
"""A connection that is to be closed, and whose client has read nothing of its last answer for so long, is cut."""
_PROBE_PATHS = frozenset(path.encode() for path in UNAUTHENTICATED_PATHS)
_LINGER_SECONDS = 2.0
_PROBE_SECONDS = (0.1, 1.0, 10.0)


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0  # received, whether or not they are whole fields
    _field_bytes = 0  # of the fields of the head
    _in_head = True
    _unused_bytes = 0  # received since the last piece of a body: extensions of chunks, fields after the last one
    _is_closing = False
    _is_probe_only = False
    _has_no_more_requests = False  # the client has closed its sending side
    _error_response: tuple[int, str] | None = None
    _receive_timer: asyncio.TimerHandle | None = None  # the client has to send something until then
    _probe_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        server_state: ConnectionTable,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = server_state
        self._pending_responses: deque[RequestResponseCycle] = deque()  # all but the first wait for it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_probe_only = not self._table.admit(self)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._stop_receive_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._drop_unanswered()
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
            self._reject_head()
            self.send_400_response("")
        elif not self._in_head and self._unused_bytes > MAX_HEAD_BYTES:
            self._reject_body_overhead()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it has left, or it has closed its sending side and waits for its answers.

        Both look the same. So something without a meaning is sent to it now and then: a client that has left answers
        that with a reset. HTTP/1.0 knows of no such thing; there, it has left.

        Returns:
            Whether the connection stays open.
        """
        if self._is_closing or self.transport.is_closing():
            return False
        if self._pending_responses and self._pending_responses[-1].more_body:  # the rest of which will not come
            cycle = self._pending_responses.pop()
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
            _drop_response(cycle)
        if not self._pending_responses or self._pending_responses[0].scope["http_version"] == "1.0":
            self._close()
            return False
        self._has_no_more_requests = True
        self._stop_receive_timer()
        if self._probe_timer is None:
            self._probe_half_closed_client(0)
        return True

    # --- what the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._field_bytes = self._unused_bytes = 0
        self.scope["mvllm.connection"] = RequestConnection(self.transport.abort)  # type: ignore[typeddict-unknown-key]
        self._start_head_timer()
        if not self._pending_responses:
            self._table.mark_reading_head(self)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head_bytes(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._stop_receive_timer()
        self._unused_bytes = 0
        if len(self._pending_responses) >= MAX_PIPELINED_REQUESTS:
            raise httptools.HttpParserError("too many requests wait for their answers")
        if self._is_probe_only and self.url.partition(b"?")[0] not in _PROBE_PATHS:
            self._error_response = (503, "All connections of this server are in use. Try again in a moment.")
            raise httptools.HttpParserError("not a health probe")
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return
        self._pending_responses.append(self.cycle)
        self._table.mark_busy(self)
        if self._is_probe_only:
            self.cycle.keep_alive = False
        if (
            len(self._pending_responses) > 1
            and sum(len(cycle.body) for cycle in self._pending_responses) <= HIGH_WATER_LIMIT
        ):
            self.flow.resume_reading()  # otherwise nobody would notice if the client left

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self._pending_responses and not self.transport.is_closing():  # the rest of one that had been answered
            self._stop_receive_timer()
            self._table.mark_idle(self)

    # --- answers

    def on_response_complete(self) -> None:
        if not self._pending_responses:  # they have been given up
            return
        cycle = self._pending_responses.popleft()
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_when_stalled()
        elif self._pending_responses:
            return
        elif self._has_no_more_requests:
            self._close()
        elif self._in_head or cycle.more_body:
            self._start_receive_timer()
            self._table.mark_reading_head(self)
        else:
            self._table.mark_idle(self)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request, and closes the connection."""
        self._stop_receive_timer()
        is_for_another = len(self._pending_responses) > 1 or any(
            cycle.response_started for cycle in self._pending_responses
        )
        self._drop_unanswered()
        if is_for_another:  # so this would be taken for the answer to that
            self._close()
            return
        status, text = self._error_response or (400, "This is not a valid HTTP/1.1 request.")
        body = error_body(status, text)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self._close_after_linger()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _drop_unanswered(self) -> None:
        """Whatever is being done for this client is of no use any more."""
        self.pipeline.clear()
        for cycle in self._pending_responses:
            _drop_response(cycle)
        self._pending_responses.clear()

    def _close(self) -> None:
        """Closes the connection when the client has read what has been sent to it."""
        if not self.transport.is_closing():
            self.transport.close()
        self._abort_when_stalled()

    def _abort_when_stalled(self) -> None:
        """Cuts a connection that is to be closed once its client reads nothing any more."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self.loop.call_later(STALL_SECONDS, self._abort_unless_read, unread)

    def _abort_unless_read(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() >= unread:
            self.transport.abort()
        else:
            self._abort_when_stalled()

    def _close_after_linger(self) -> None:
        """Closes the connection when the client has had time to read the answer.

        A connection that is closed while bytes are unread is reset, and the answer may be lost with it.
        """
        self._is_closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _probe_half_closed_client(self, number: int) -> None:
        """Sends the client something without a meaning, and goes on with it until everything is answered.

        If nobody is there, the next write fails, and the connection is lost.
        """
        self._probe_timer = None
        if self.transport.is_closing() or not self._pending_responses:
            return
        cycle = self._pending_responses[0]
        piece = b""
        if not cycle.response_started:
            piece = b"HTTP/1.1 100 Continue\r\n\r\n"
        elif cycle.chunked_encoding:
            filler = cycle.scope["mvllm.connection"].filler  # type: ignore[typeddict-item]
            piece = b"%x\r\n%b\r\n" % (len(filler), filler) if filler else b""
        if piece and not self.flow.write_paused:
            self.transport.write(piece)
        seconds = _PROBE_SECONDS[min(number, len(_PROBE_SECONDS) - 1)]
        self._probe_timer = self.loop.call_later(seconds, self._probe_half_closed_client, number + 1)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # the request is answered as if it had not asked

    # --- limits

    def _count_head_bytes(self, num_bytes: int) -> None:
        self._field_bytes += num_bytes
        if self._field_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._reject_head()
            raise httptools.HttpParserError("the head is too long")

    def _reject_head(self) -> None:
        self._error_response = (
            431,
            f"Headers may have {MAX_HEAD_BYTES} bytes, and there may be {MAX_HEADERS} of them.",
        )

    def _reject_body_overhead(self) -> None:
        """What a chunked body has beside its data grows without an end; the parser would keep all of it."""
        if self.cycle is not None and self.cycle.response_complete:
            self.transport.close()  # another answer would be taken for that to the next request
            return
        self._reject_head()
        self.send_400_response("")

    def _start_head_timer(self) -> None:
        if self._receive_timer is None:
            self._in_head, self._head_bytes = True, 0
            self._start_receive_timer()

    def _start_receive_timer(self) -> None:
        if self._receive_timer is None:
            self._receive_timer = self.loop.call_later(HEAD_SECONDS, self._on_receive_timeout)

    def _stop_receive_timer(self) -> None:
        self._in_head = False
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _on_receive_timeout(self) -> None:
        self._receive_timer = None
        if not self._pending_responses:
            self._close()


def _drop_response(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def uvicorn_settings() -> dict[str, Any]:
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
