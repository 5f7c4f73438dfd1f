"""Options of ZeroMQ sockets between processes of one user on one machine: addresses, access, reconnection."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import zmq

HAS_ABSTRACT_SOCKETS = bool(sys.platform == "linux")  # names that leave nothing behind

_RECONNECT_MS, _MAX_RECONNECT_MS = 2, 100
_IPC_FILTER_UID = 59  # a socket option that pyzmq has no name for


def make_ipc_prefix() -> str:
    """A random prefix of addresses that no other process can guess.

    The names are in Linux' abstract namespace. Elsewhere they are files in a folder that only this user may enter, and
    that is removed at exit.
    """
    if HAS_ABSTRACT_SOCKETS:
        return f"ipc://@mvllm-{secrets.token_hex(16)}-"
    folder = tempfile.mkdtemp(prefix="mvllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return f"ipc://{folder}/"


def bind_ipc_socket(socket: zmq.Socket[bytes], address: str) -> None:
    """Binds a socket to which, on Linux, only processes of this user may connect, as reported by the kernel."""
    if sys.platform == "linux":
        socket.setsockopt(_IPC_FILTER_UID, os.getuid())
    socket.bind(address)


def connect_ipc_socket(socket: zmq.Socket[bytes], address: str) -> None:
    """Connects a socket whose address may not be bound yet: it tries again after 2 ms, later after up to 100 ms."""
    import zmq

    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
    socket.connect(address)
