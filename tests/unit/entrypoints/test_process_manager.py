"""The parent of several API servers: its messages when a server dies, without processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import msgspec

from mvllm.engine.process.message_socket import MessageSocket, message_socket_pair
from mvllm.entrypoints.openai.server.api_server_proc import ShutdownSignal
from mvllm.entrypoints.openai.server.process_manager import _ProcessManager


def test_two_concurrent_deaths_send_one_signal_to_the_other_servers():
    """A second signal would make them abort the requests that they should finish."""
    ours, theirs = (MessageSocket(end) for end in message_socket_pair())
    manager: Any = object.__new__(_ProcessManager)
    manager._servers = [SimpleNamespace(failure=f"{index} died.", expect_exits=lambda: None) for index in range(2)]
    manager._settings = SimpleNamespace(shutdown_timeout=60.0)
    manager._engine_cores, manager._control_sockets, manager._deadline = [], [ours], float("inf")
    assert manager._on_server_death(0) and manager._on_server_death(1)
    received = [msgspec.msgpack.decode(data, type=ShutdownSignal) for data in iter(theirs.receive, None)]
    assert received == [ShutdownSignal(signal.SIGTERM)] and manager._status == 1
    for end in (ours, theirs):
        end.close()
