"""The client of the data parallel coordinator, in each of several front ends.

Loads and prefixes are hints: a front end that receives them late or never balances its requests less well.
`SleepNotice` is not: its caller waits until all front ends have answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from mvllm.engine.process.dp_load_balancer import DPLoadBalancer
from mvllm.engine.process.message_socket import MessageSocket
from mvllm.errors import EngineDeadError
from mvllm.logging import get_logger
from mvllm.messages.coordinator_protocol import CoreLoad, CoreLoads, SentPrefixes, SleepDone, SleepNotice, ToFrontEnd

logger = get_logger(__name__)

PREFIX_PUBLISH_SECONDS = 0.02  # how long sent prefixes are collected before they are published
MAX_HASHES_PER_MESSAGE = 8192  # fits into a message with room to spare


class CoordinatorClient:
    """Used in the loop's thread once attached.

    Args:
        coordinator: The socket to the coordinator.
        index: This front end's index in the loads that cores report.
    """

    def __init__(self, coordinator: MessageSocket, index: int) -> None:
        self._socket = coordinator
        self._index = index
        self._decoder: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._publish_timer: asyncio.TimerHandle | None = None
        self._load_balancer: DPLoadBalancer | None = None
        self._on_loads: Callable[[Sequence[CoreLoad]], None] = lambda loads: None
        self._on_sleep: Callable[[bool], None] = lambda is_sleeping: None
        self._pending_sleeps: dict[int, asyncio.Future[None]] = {}
        self._num_sleep_calls = 0

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        load_balancer: DPLoadBalancer,
        on_loads: Callable[[Sequence[CoreLoad]], None],
        on_sleep: Callable[[bool], None],
    ) -> None:
        """Starts to read messages in `loop`, which runs in the calling thread.

        Args:
            load_balancer: Updated with the prefixes and loads of other front ends.
            on_loads: Called with the loads that cores report.
            on_sleep: Called when another front end puts the engine to sleep (True) or wakes it up (False).
        """
        self._loop, self._load_balancer = loop, load_balancer
        self._on_loads, self._on_sleep = on_loads, on_sleep
        load_balancer.records_new_prefixes = True
        loop.add_reader(self._socket.fd, self._read)
        self._read()

    def schedule_prefix_publish(self) -> None:
        """Publishes the prefixes sent to replicas within `PREFIX_PUBLISH_SECONDS`."""
        if self._publish_timer is None and self._loop is not None:
            self._publish_timer = self._loop.call_later(PREFIX_PUBLISH_SECONDS, self._publish_prefixes)

    async def broadcast_sleep(self, is_sleeping: bool) -> None:
        """Sends `sleep` or `wake_up` to all other front ends; returns when they have applied it."""
        assert self._loop is not None
        self._num_sleep_calls += 1
        number = self._num_sleep_calls
        done = self._pending_sleeps[number] = self._loop.create_future()
        try:
            while not self._socket.send(SleepNotice(number, is_sleeping)):
                await asyncio.sleep(PREFIX_PUBLISH_SECONDS)
            await done
        finally:
            self._pending_sleeps.pop(number, None)

    def close(self) -> None:
        """Idempotent. Call in the loop's thread, or from any thread when the loop has ended."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            if self._publish_timer is not None:
                self._publish_timer.cancel()
            loop.remove_reader(self._socket.fd)
            for done in self._pending_sleeps.values():
                if not done.done():
                    done.set_exception(EngineDeadError("The engine has been shut down."))
        self._socket.close()

    def _publish_prefixes(self) -> None:
        self._publish_timer = None
        assert self._load_balancer is not None
        for replica, names in self._load_balancer.pop_new_prefixes():
            for start in range(0, len(names), MAX_HASHES_PER_MESSAGE):
                self._socket.send(SentPrefixes(replica, names[start : start + MAX_HASHES_PER_MESSAGE]))

    def _send_sleep_done(self, done: SleepDone) -> None:
        """Sends the answer, again later while the socket's buffer is full: the caller waits for it."""
        if not self._socket.send(done) and self._loop is not None:
            self._loop.call_later(PREFIX_PUBLISH_SECONDS, self._send_sleep_done, done)

    def _read(self) -> None:
        while self._loop is not None and (data := self._socket.receive()) is not None:
            try:
                self._handle_message(self._decoder.decode(data))
            except msgspec.MsgspecError as e:
                logger.error("Dropped a message of the coordinator that cannot be decoded: %s", e)

    def _handle_message(self, message: ToFrontEnd) -> None:
        assert self._load_balancer is not None
        match message:
            case CoreLoads():
                for load in message.loads:
                    self._load_balancer.num_other_front_ends = len(load.unfinished) - 1
                    others = (count for index, count in enumerate(load.unfinished) if index != self._index)
                    self._load_balancer.loads_elsewhere[load.rank] = sum(others)
                self._on_loads(message.loads)
            case SentPrefixes():
                self._load_balancer.record_prefixes(message.rank, message.hashes)
            case SleepNotice():
                self._on_sleep(message.is_sleeping)
                self._send_sleep_done(SleepDone(message.id))
            case SleepDone():
                with contextlib.suppress(KeyError, asyncio.InvalidStateError):
                    self._pending_sleeps[message.id].set_result(None)
