"""An engine core in a process of its own, from its start to its end: what every client of one has in common.

How news of the core are waited for is the client's affair: with `poll` (SyncMPClient) or in an event loop
(AsyncMPClient).
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import zmq

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.process.core_handshake import CoreReady
from mvllm.engine.process.launch import TIMEOUT_MARGIN_SECONDS, CoreChildProcess
from mvllm.engine.process.zmq_channel import ChannelAddress, ClientChannel, new_addresses
from mvllm.errors import EngineDeadError
from mvllm.executor.process.activity_table import Activity
from mvllm.executor.process.process_utils import ensure_standard_streams
from mvllm.messages.core_protocol import Command, StopCore


class LaunchedCoreConnection:
    """One engine core's process and the sockets to it.

    Args:
        name: What the process is called, for instance `EngineCore`.
        config: The settled configuration.
        platform: The platform's name.
        front_ends: Where other processes, which the core serves as well, talk to it.
        coordinator_fd: The core's socket to the coordinator, which is inherited.

    Attributes:
        process: The process.
        channel: The front end's end of the sockets.
        unresponsive_timeout: Seconds without a sign of life after which a core that has work is taken for hung.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        platform: str,
        front_ends: Sequence[ChannelAddress] = (),
        coordinator_fd: int | None = None,
    ) -> None:
        ensure_standard_streams()
        self.unresponsive_timeout = config.parallel.step_timeout + TIMEOUT_MARGIN_SECONDS
        [own] = new_addresses()
        self._identity = own.identity
        self.channel = ClientChannel([own])
        self.process = CoreChildProcess(name, config, platform, [own, *front_ends], coordinator_fd)
        self._launched = 0.0
        # Also run when the link is dropped without a word, and when the interpreter ends.
        self._finalizer = weakref.finalize(self, _shut_down, self.process, self.channel, self._identity, os.getpid())

    @property
    def is_open(self) -> bool:
        """Whether `shutdown` has not been called."""
        return self._finalizer.alive

    @property
    def pid(self) -> int:
        """The core's process."""
        return self.process.pid

    @property
    def activity(self) -> Activity:
        """What the core said last that it is doing."""
        return self.process.activity

    @property
    def shared_step_age(self) -> float:
        """None: it works for this front end alone."""
        return 0.0

    @property
    def failure_fd(self) -> int:
        """Readable for good once the core can no longer be used."""
        return self.process.stop.fd

    def launch(self) -> None:
        """Starts the process; returns when it exists."""
        self._launched = time.perf_counter()
        self.process.launch()

    def wait_ready(self) -> tuple[CoreReady, dict[str, float]]:
        """Waits until commands can be sent. Returns what the core says of itself, and seconds per phase of its start.

        Raises:
            Exception: The core's own exception, if it cannot be started.
        """
        ready = self.process.wait_ready()
        self._wait_connected()
        # The rest is what it takes until the process can begin: an interpreter and its imports.
        rest = time.perf_counter() - self._launched - sum(ready.start_seconds.values())
        return ready, {"start engine core": rest, **ready.start_seconds}

    def check_usable(self) -> None:
        """Raises unless the core can be used.

        Raises:
            EngineDeadError: It has failed, for the reason kept as the cause, or was shut down.
        """
        if not self.is_open:
            raise EngineDeadError("The engine core has been shut down.")
        if (failure := self.process.failure) is not None:
            raise as_engine_dead_error(failure)

    def send(self, command: Command) -> int:
        """Queues a command; never blocks. Returns its number.

        Raises:
            zmq.ZMQError: The core's end of the socket is closed: the news of its death are on their way.
        """
        return self.channel.send(self._identity, command)

    def terminate_with_error(self, error: EngineDeadError) -> EngineDeadError:
        """Ends the engine core because of `error`, or of what was behind it; returns that."""
        return as_engine_dead_error(self.process.terminate_with_error(error))

    def kill_unresponsive(self) -> None:
        """Ends a core that has been silent for too long. Asks it for its stacks first, and waits for them."""
        self.terminate_with_error(self.process.stuck(self.unresponsive_timeout, "has given no sign of life"))

    def shutdown(self) -> None:
        """Ends the engine core and its workers. Idempotent."""
        self._finalizer()

    def _wait_connected(self) -> None:
        if not wait_connected(self.channel, self.failure_fd, self.unresponsive_timeout, self.process.check_usable):
            raise self.process.terminate_with_error(self.process.stuck(self.unresponsive_timeout, "has not connected"))


def wait_connected(channel: ClientChannel, failure_fd: int, seconds: float, check: Callable[[], None]) -> bool:
    """Waits until a channel's cores have come; returns whether they have in time.

    Args:
        failure_fd: Readable when they will never.
        check: Raises why.
    """
    poller = zmq.Poller()
    poller.register(channel.commands, zmq.POLLIN)
    poller.register(failure_fd, zmq.POLLIN)
    deadline = time.monotonic() + seconds
    while not channel.all_connected():
        check()
        if not poller.poll(milliseconds(deadline - time.monotonic())):
            return False
    return True


def as_engine_dead_error(error: Exception) -> EngineDeadError:
    """`error`, or the error for what it means to a running engine."""
    if isinstance(error, EngineDeadError):
        return error
    death = EngineDeadError(f"The engine stopped: {type(error).__name__}: {error}")
    death.__cause__ = error
    return death


def milliseconds(seconds: float) -> int:
    """For `poll`: rounded up, and not negative."""
    return max(0, math.ceil(seconds * 1e3))


def _shut_down(process: CoreChildProcess, channel: ClientChannel, identity: bytes, pid: int) -> None:
    """The ladder: a message, then whatever WorkerGroup.end does, then the sockets."""
    if os.getpid() != pid:  # a fork of the front end's process: nothing of this is its own
        return
    if process.is_monitor_thread():  # by the garbage collector, which comes in any thread; this one has to see the end
        args = (process, channel, identity, pid)
        threading.Thread(target=_shut_down, args=args, name="core-shutdown", daemon=True).start()
        return
    told = False
    try:
        if process.is_usable:
            process.expect_exit()
            try:
                channel.send(identity, StopCore())
                told = True
            except zmq.ZMQError:  # it is on its way out already
                told = False
        process.terminate(told=told)
    finally:  # also when Ctrl-C interrupts what is above
        process.terminate(told=False)
        channel.close()
        process.close()
