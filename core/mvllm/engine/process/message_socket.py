"""Messages between two processes of one server over a socket pair that both were born with: whole, or not at all.

Neither side ever waits for the other: a message for which there is no room is not sent, and its sender is told so.
"""

from __future__ import annotations

import socket
import sys

import msgspec

# Both keep messages whole. The first holds more of them, but is not everywhere.
_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
_MAX_MESSAGE_BYTES = 128 << 10


def message_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends. One is passed on to another process by its descriptor, and then closed here."""
    return socket.socketpair(socket.AF_UNIX, _KIND)


class MessageSocket:
    """One end.

    Args:
        end: The socket, or the descriptor of one that was inherited; taken over.
    """

    def __init__(self, end: socket.socket | int) -> None:
        self._socket = end if isinstance(end, socket.socket) else socket.socket(fileno=end)
        self._socket.setblocking(False)
        self.fd = self._socket.fileno()

    def send(self, message: msgspec.Struct) -> bool:
        """Sends a message; returns whether there was room for it and somebody to read it."""
        try:
            self._socket.send(msgspec.msgpack.encode(message))
        except OSError:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next message, or None when there is none now."""
        try:
            return self._socket.recv(_MAX_MESSAGE_BYTES) or None  # an empty one is the other side's end
        except OSError:
            return None

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
