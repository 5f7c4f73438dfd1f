"""Ports for what has to be told a port before it listens there."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from pathlib import Path

_PORTS = range(18_000, 32_000)
"""Below those that the kernel gives to connections, and to sockets that are bound to port 0."""
_claims: list[int] = []  # descriptors of locked files
_positions = itertools.count(os.getpid() * 64)


def free_port() -> int:
    """A TCP port on which nobody listens, and which no other caller gets as long as this process runs."""
    folder = Path(tempfile.gettempdir()) / f"mvllm-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for position in itertools.islice(_positions, len(_PORTS)):
        port = _PORTS[position % len(_PORTS)]
        claim = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(claim)
            continue
        _claims.append(claim)
        return port
    raise RuntimeError(f"no port of {_PORTS} is free")


def listens(port: int) -> bool:
    """Whether a program takes connections at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
