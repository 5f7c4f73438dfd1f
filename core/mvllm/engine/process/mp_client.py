"""The base of both clients of an engine core in another process: buffered requests, call ids, the silence limit.

SyncMPClient waits for updates with `poll`, AsyncMPClient reads them in an event loop.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.process.core_connection import CoreConnection
from mvllm.engine.process.launch import TIMEOUT_MARGIN_SECONDS
from mvllm.executor.process.activity_table import Activity
from mvllm.messages.commands import COMMANDS, EngineCommand
from mvllm.messages.core_protocol import AddRequests, CallCore
from mvllm.messages.multimodal import omit_sent_features
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest


class MPClient:
    """The state of a client that sends commands to an engine core process and receives its updates.

    Args:
        config: The resolved configuration.
        connection: The engine core.
        platform_summary: The platform's name and the plugin it came from.

    Attributes:
        config, platform_summary: As given.
        cache_summary: The KV cache as it was sized.
        num_workers: Workers of the engine core.
        start_seconds: Seconds per start-up phase.
    """

    cache_summary: KVCacheSummary
    num_workers: int
    start_seconds: dict[str, float]

    def __init__(self, config: EngineConfig, connection: CoreConnection, platform_summary: str) -> None:
        self.config = config
        self.platform_summary = platform_summary
        self._connection = connection
        self._channel = connection.channel
        self._encoder = msgspec.msgpack.Encoder()
        self._new_ids: list[str] = []
        self._new_requests: list[msgspec.Raw] = []
        self._new_items: set[bytes] = set()  # whose features the next AddRequests has
        self._num_calls = 0
        self._num_acknowledged = 0
        self._is_busy = False

    def wait_ready(self) -> None:
        """Returns when requests can be sent.

        Raises:
            Exception: The core's own exception, if it cannot be started.
        """
        ready, self.start_seconds = self._connection.wait_ready()
        self.cache_summary, self.num_workers = ready.cache_summary, ready.num_workers

    def _buffer_request(self, request: EngineCoreRequest) -> None:
        """Encodes a validated request for the next AddRequests: the core starts requests of one command together."""
        if request.items:
            sent = set(self._new_items)
            request = msgspec.structs.replace(request, items=omit_sent_features(request.items, sent))
            encoded = msgspec.Raw(self._encoder.encode(request))
            self._new_items = sent
        else:
            encoded = msgspec.Raw(self._encoder.encode(request))
        self._new_ids.append(request.request_id)
        self._new_requests.append(encoded)

    def _take_buffered_requests(self) -> AddRequests | None:
        """The command with all buffered requests, which leave the buffer; None if there are none."""
        if not self._new_ids:
            return None
        command = AddRequests(self._new_ids, self._new_requests)
        self._new_ids, self._new_requests, self._new_items = [], [], set()
        return command

    def _number_call(self, command: EngineCommand[Any]) -> CallCore:
        encoded = msgspec.Raw(self._encoder.encode(command))
        self._num_calls += 1
        return CallCore(self._num_calls, command.name, encoded)

    def _record_progress(self, outputs: EngineCoreOutputs) -> None:
        self._num_acknowledged = outputs.num_acknowledged
        self._is_busy = outputs.is_busy

    @property
    def _expects_update(self) -> bool:
        """Whether the core has work, or has not acknowledged every command."""
        return self._is_busy or self._num_acknowledged != self._channel.num_sent

    def _silence_limit(self, activity: Activity) -> float:
        """Seconds for which a core with this activity may send no update before it is considered hung."""
        limit = self._connection.unresponsive_timeout
        command = COMMANDS.get(activity.text)
        if command is not None and command.is_long:  # may read the weights again
            return max(limit, self.config.parallel.start_timeout + TIMEOUT_MARGIN_SECONDS)
        return limit
