"""How an engine core's process is told what it is, and how it says that it is ready.

The same socket pair and the same kind of messages as for a worker's process; see `mvllm.executor.process.handshake`.
"""

from __future__ import annotations

import msgspec

from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.process.zmq_channel import ChannelAddress
from mvllm.executor.process.handshake import Handshake


class EngineCoreStartArgs(msgspec.Struct, frozen=True):
    """Everything an engine core's process needs to know.

    Attributes:
        name: For logs, errors and the process list.
        platform: The platform's name; the plugin is found again by it.
        config: The settled configuration, see config_codec.
        addresses: Where commands come from and news go, by front end. The first one's owner owns the core.
        coordinator_fd: The socket to the coordinator, where there is one.
        activity_fd: A status board of one line.
        stack_fd, sys_path, python_path, log_level: As for a worker.
    """

    name: str
    platform: str
    config: bytes
    addresses: list[ChannelAddress]
    coordinator_fd: int | None
    activity_fd: int
    stack_fd: int
    sys_path: list[str]
    python_path: str | None
    log_level: str

    @property
    def rank(self) -> int:
        """Its line on the board."""
        return 0


class CoreReady(msgspec.Struct, frozen=True):
    """What a started engine core says of itself."""

    cache_summary: KVCacheSummary
    start_seconds: dict[str, float]


class CoreHandshake(Handshake, frozen=True):
    """The engine core's answer: it waits for requests, or has failed, before that or later.

    Attributes:
        ready: Set if it waits for requests.
    """

    ready: CoreReady | None = None
