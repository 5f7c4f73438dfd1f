"""HTTP connections to a model server without a port or a file: each is a socket pair, one end of which is sent to it.

    router          ends = socketpair()    keeps one, sends the other's descriptor over a socket that both inherited
    model server    accept()               receives the descriptor, and serves the connection like any other

So nothing but the router can connect, and no name is left when a process is killed.
"""

from __future__ import annotations

import socket

from mvllm.extension_api.processes import message_socket_pair

connection_socket_pair = message_socket_pair
"""Makes the two ends: one for ConnectionSender, and one whose descriptor a child inherits for ConnectionListener."""

_BODY = b"c"


class ConnectionSender:
    """Opens connections.

    Args:
        end: The router's end; closed by `close`.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)

    def connect(self) -> socket.socket:
        """A new connection, not blocking.

        Raises:
            BlockingIOError: The model server has not accepted many earlier ones yet.
            OSError: It has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                socket.send_fds(self._socket, [_BODY], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class ConnectionListener(socket.socket):
    """The model server's end, used like a listening socket: `accept` returns the next connection.

    Args:
        fd: The inherited descriptor.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fileno=fd)

    def accept(self) -> tuple[socket.socket, None]:
        """The next connection.

        Raises:
            BlockingIOError: There is none now.
            ConnectionAbortedError: The message had none.
        """
        _, fds, _, _ = socket.recv_fds(self, len(_BODY), 1, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        if not fds:
            raise ConnectionAbortedError("no descriptor was received")
        connection = socket.socket(fileno=fds[0])
        connection.set_inheritable(False)
        return connection, None
