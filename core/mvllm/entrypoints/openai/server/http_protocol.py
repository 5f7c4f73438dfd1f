"""HTTP/1.1 protocol of one connection, with limits: size and time of a request's head, and pipelined requests.

It extends uvicorn's protocol on httptools, which is fast and has no such limits. Rejected requests get a JSON error.
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
from mvllm.entrypoints.openai.common.streaming_response import RequestConnection, WriteChunk
from mvllm.entrypoints.openai.server.connections import ConnectionTable
from mvllm.entrypoints.openai.server.middleware import UNAUTHENTICATED_PATHS

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
MAX_PIPELINED_REQUESTS = 32
"""Requests of one connection without a response. One more closes the connection."""
HEAD_SECONDS = 20.0
"""From the connection, or the first byte of a later request, to the end of the request's headers; also the time for the
rest of a body whose response has been sent already."""
STALL_SECONDS = 60.0
"""A closing connection is aborted when its client has read nothing of the last response for so long."""
_PROBE_PATHS = frozenset(path.encode() for path in UNAUTHENTICATED_PATHS)
_LINGER_SECONDS = 2.0
_PROBE_SECONDS = (0.1, 1.0, 10.0)


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0  # received, with incomplete fields
    _field_bytes = 0  # of the fields of the head
    _in_head = True
    _unused_bytes = 0  # received since the last body data: chunk extensions, trailers
    _is_closing = False
    _is_probe_only = False
    _has_no_more_requests = False  # the client has closed its sending side
    _error_response: tuple[int, str] | None = None
    _receive_timer: asyncio.TimerHandle | None = None  # runs while the client has to send something
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
        self._pending_responses: deque[RequestResponseCycle] = deque()  # in order; the first is being sent

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
        """The client has disconnected, or has closed its sending side and still reads responses.

        Both look the same, so probe data without a meaning is sent now and then: a disconnected client answers it with
        a reset. HTTP/1.0 has no such data; its clients count as disconnected.

        Returns:
            Whether the connection stays open.
        """
        if self._is_closing or self.transport.is_closing():
            return False
        if self._pending_responses and self._pending_responses[-1].more_body:  # the rest of its body will not come
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

    # --- parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._field_bytes = self._unused_bytes = 0
        self.scope["mvllm.connection"] = RequestConnection(  # type: ignore[typeddict-unknown-key]
            self.transport.abort, self._chunk_writer
        )
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
            raise httptools.HttpParserError("too many pipelined requests")
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
            self.flow.resume_reading()  # so that a disconnect is noticed

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self._pending_responses and not self.transport.is_closing():  # its response was sent before
            self._stop_receive_timer()
            self._table.mark_idle(self)

    # --- responses

    def on_response_complete(self) -> None:
        if not self._pending_responses:  # they were dropped
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

    def _chunk_writer(self, connection: RequestConnection) -> WriteChunk | None:
        """See `RequestConnection.write_chunk`."""
        cycle = self._pending_responses[0] if self._pending_responses else None
        if (
            cycle is None
            or cycle.scope["mvllm.connection"] is not connection  # type: ignore[typeddict-item]
            or not cycle.chunked_encoding
            or cycle.disconnected
            or self.flow.write_paused
        ):
            return None
        return self._write_chunk

    def _write_chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def send_400_response(self, msg: str) -> None:
        """Answers data that is not a valid request with an error, and closes the connection."""
        self._stop_receive_timer()
        is_ambiguous = len(self._pending_responses) > 1 or any(
            cycle.response_started for cycle in self._pending_responses
        )
        self._drop_unanswered()
        if is_ambiguous:  # the client would take it for the response to an earlier request
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
        """Aborts the requests whose response has not been sent."""
        self.pipeline.clear()
        for cycle in self._pending_responses:
            _drop_response(cycle)
        self._pending_responses.clear()

    def _close(self) -> None:
        """Closes the connection when the client has read the send buffer."""
        if not self.transport.is_closing():
            self.transport.close()
        self._abort_when_stalled()

    def _abort_when_stalled(self) -> None:
        """Aborts a closing connection when its client has stopped reading."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self.loop.call_later(STALL_SECONDS, self._abort_unless_read, unread)

    def _abort_unless_read(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() >= unread:
            self.transport.abort()
        else:
            self._abort_when_stalled()

    def _close_after_linger(self) -> None:
        """Closes the connection after time for the client to read the response.

        Closing a connection with unread bytes resets it, and the client may lose the response.
        """
        self._is_closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _probe_half_closed_client(self, number: int) -> None:
        """Sends probe data without a meaning, again and again until all responses are sent.

        If the client has disconnected, the next write fails, and the connection is lost.
        """
        self._probe_timer = None
        if self.transport.is_closing() or not self._pending_responses:
            return
        cycle = self._pending_responses[0]
        probe = b""
        if not cycle.response_started:
            probe = b"HTTP/1.1 100 Continue\r\n\r\n"
        elif cycle.chunked_encoding:
            filler = cycle.scope["mvllm.connection"].filler  # type: ignore[typeddict-item]
            probe = b"%x\r\n%b\r\n" % (len(filler), filler) if filler else b""
        if probe and not self.flow.write_paused:
            self.transport.write(probe)
        seconds = _PROBE_SECONDS[min(number, len(_PROBE_SECONDS) - 1)]
        self._probe_timer = self.loop.call_later(seconds, self._probe_half_closed_client, number + 1)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # the upgrade is ignored without a warning

    # --- limits

    def _count_head_bytes(self, num_bytes: int) -> None:
        self._field_bytes += num_bytes
        if self._field_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._reject_head()
            raise httptools.HttpParserError("the head is too long")

    def _reject_head(self) -> None:
        self._error_response = (
            431,
            f"A request may have {MAX_HEADERS} headers of {MAX_HEAD_BYTES} bytes together; this one has more.",
        )

    def _reject_body_overhead(self) -> None:
        """Rejects a chunked body with too many bytes beside its data, all of which the parser would keep."""
        if self.cycle is not None and self.cycle.response_complete:
            self.transport.close()  # the client would take a second response for that to the next request
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
    """Settings for uvicorn: this protocol, and no logs, headers or WebSockets of its own."""
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
