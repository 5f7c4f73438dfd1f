"""Messages between two processes of one server, over a socket pair that both inherit; each arrives whole or not at all.

Neither side waits for the other: if the buffer is full, `send` returns False.
"""

from __future__ import annotations

import socket
import sys

import msgspec

# Both keep message boundaries. The first buffers more messages, but exists on Linux only.
_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
_MAX_MESSAGE_BYTES = 128 << 10


def message_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends. One is inherited by another process, by its descriptor, and then closed here."""
    return socket.socketpair(socket.AF_UNIX, _KIND)


class MessageSocket:
    """One end of the socket pair.

    Args:
        end: The socket, or the descriptor of an inherited one; closed by `close`.
    """

    def __init__(self, end: socket.socket | int) -> None:
        self._socket = end if isinstance(end, socket.socket) else socket.socket(fileno=end)
        self._socket.setblocking(False)
        self.fd = self._socket.fileno()

    def send(self, message: msgspec.Struct) -> bool:
        """Sends a message; returns False if the buffer is full or the other end is closed."""
        try:
            self._socket.send(msgspec.msgpack.encode(message))
        except OSError:
            return False
        return True

    def receive(self) -> bytes | None:
        """Receives the next message; None if there is none now."""
        try:
            return self._socket.recv(_MAX_MESSAGE_BYTES) or None  # empty: the other end is closed
        except OSError:
            return None

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
