"""The server's listening socket, bound before the model is loaded, so that a port in use is reported at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from mvllm.entrypoints.openai.server.connections import raise_descriptor_limit
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.shutdown_signals import ignore_shutdown_signals, remove_on_exit
from mvllm.errors import ConfigError, plain_reason

_BACKLOG = 2048


@contextlib.contextmanager
def open_listener(settings: ServerSettings) -> Iterator[socket.socket]:
    """The socket of a server's address, closed at the end; signals are ignored from then on. Raises the process's limit
    of descriptors, so that it can have many connections.

    Raises:
        ConfigError: The address cannot be used.
    """
    raise_descriptor_limit()
    if settings.uds is None:
        listener = listen_tcp(settings.host, settings.port)
    else:
        listener = listen_unix(settings.uds)
        remove_on_exit(Path(settings.uds))
    try:
        yield listener
    finally:
        ignore_shutdown_signals()
        listener.close()
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)


def listen_tcp(host: str, port: int) -> socket.socket:
    """A socket that listens on a TCP address.

    Raises:
        ConfigError: The address does not belong to this machine, or its port is in use; names the owner.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--host {host!r} has no address to listen on: {plain_reason(e)}.") from e
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} of {host} is in use by {_port_owner(port)}. End that process, or choose another --port."
            ) from e
        raise ConfigError(f"Cannot listen on {host}, port {port}: {e.strerror or e}.") from e
    return listener


def listen_unix(path: str) -> socket.socket:
    """A Unix domain socket that listens at a path, for this user only.

    Raises:
        ConfigError: The path cannot be used, or a process listens there already.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(f"Cannot listen at --uds {path!r}: {e.strerror or e}.") from e
    return listener


def listener_url(listener: socket.socket) -> str:
    """The URL of a listener."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix:{address}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}"


def is_public(listener: socket.socket) -> bool:
    """Whether a listener accepts connections from other machines."""
    address = listener.getsockname()
    if isinstance(address, str):
        return False
    host = address[0].removeprefix("::ffff:")
    return not (host.startswith("127.") or host == "::1")


def _remove_stale(path: str) -> None:
    """Removes a socket that no process listens at."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()


def _port_owner(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                with contextlib.suppress(psutil.Error):
                    return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
                return f"pid {connection.pid}"
    return "a process of another user"
