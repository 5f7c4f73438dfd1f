"""The start arguments of an engine core process, and its answer to them.

They are sent as those of a worker process, see `mvllm.executor.process.handshake`.
"""

from __future__ import annotations

import msgspec

from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.process.zmq_channel import ChannelAddress
from mvllm.executor.process.handshake import ChildStartArgs, Handshake


class EngineCoreStartArgs(ChildStartArgs, frozen=True, kw_only=True):
    """What an engine core process is started with.

    Attributes:
        platform: The platform's name, by which the process finds the plugin.
        config: The resolved configuration, see config_codec.
        addresses: The sockets of each front end. The first front end is in the process that starts the core.
        coordinator_fd: The socket to the coordinator, where there is one.
    """

    platform: str
    config: bytes
    addresses: list[ChannelAddress]
    coordinator_fd: int | None


class CoreReady(msgspec.Struct, frozen=True):
    """The facts about a started engine core: attributes of EngineCore."""

    cache_summary: KVCacheSummary
    start_seconds: dict[str, float]
    num_workers: int


class CoreHandshake(Handshake, frozen=True):
    """The engine core's answer: it waits for requests, or has failed, before that or later.

    Attributes:
        ready: Set if it waits for requests.
    """

    ready: CoreReady | None = None
