"""The connection to an engine core that this process has started, and that it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import zmq

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.process.core_connection import CoreConnection
from mvllm.engine.process.core_handshake import CoreReady
from mvllm.engine.process.launch import TIMEOUT_MARGIN_SECONDS, CoreChildProcess
from mvllm.engine.process.zmq_channel import ChannelAddress, ClientChannel, new_address
from mvllm.errors import EngineDeadError
from mvllm.executor.process.process_utils import ensure_standard_streams
from mvllm.messages.core_protocol import StopCore


class LaunchedCoreConnection(CoreConnection):
    """See CoreConnection.

    Args:
        name: The name of the core's process, for instance `EngineCore`.
        config: The resolved configuration.
        platform: The platform's name.
        front_ends: The addresses of other processes' front ends, which the core serves as well.
        coordinator_fd: The core's socket to the coordinator, which is inherited.

    Attributes:
        process: The core's process.
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
        channel = ClientChannel(new_address())
        self.process = CoreChildProcess(name, config, platform, [channel.address, *front_ends], coordinator_fd)
        super().__init__(
            channel,
            self.process.activity_table,
            self.process.stop.fd,
            config.parallel.step_timeout + TIMEOUT_MARGIN_SECONDS,
            partial(_shut_down, self.process, channel),
        )
        self._launched = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def failure(self) -> EngineDeadError | None:
        failure = self.process.failure
        return None if failure is None else as_engine_dead_error(failure)

    def dump_stack(self) -> str:
        """As in CoreConnection. Blocks for up to half a second."""
        return self.process.dump_stack()

    def launch(self) -> None:
        self._launched = time.perf_counter()
        self.process.launch()

    def wait_ready(self) -> tuple[CoreReady, dict[str, float]]:
        ready = self.process.wait_started()
        if not self._wait_connected(self.process.check):
            raise self.process.fail_with_root_cause(
                self.process.unresponsive_error(self.unresponsive_timeout, "has not connected")
            )
        # The rest is the time before the core's own first phase: the start of an interpreter, and its imports.
        rest = time.perf_counter() - self._launched - sum(ready.start_seconds.values())
        return ready, {"start engine core": rest, **ready.start_seconds}

    def terminate_with_error(self, error: EngineDeadError) -> EngineDeadError:
        """Ends the engine core because of `error`, or of the failure that caused it; returns that."""
        return as_engine_dead_error(self.process.fail_with_root_cause(error))

    def kill_unresponsive(self) -> None:
        """Asks the core for its stacks first, and waits for them."""
        self.terminate_with_error(
            self.process.unresponsive_error(self.unresponsive_timeout, "has given no sign of life")
        )


def as_engine_dead_error(error: Exception) -> EngineDeadError:
    """`error` if it is an EngineDeadError, else a new one with `error` as its cause."""
    if isinstance(error, EngineDeadError):
        return error
    death = EngineDeadError(f"The engine stopped: {type(error).__name__}: {error}")
    death.__cause__ = error
    return death


def _shut_down(process: CoreChildProcess, channel: ClientChannel) -> None:
    """Sends StopCore, then ends the process (see ChildProcessGroup.terminate), then closes the sockets."""
    if process.is_monitor_thread():  # the garbage collector runs in any thread; this one has to notice the exit
        threading.Thread(target=_shut_down, args=(process, channel), name="core-shutdown", daemon=True).start()
        return
    stop_sent = False
    try:
        if process.is_usable:
            process.expect_exits()
            try:
                channel.send(StopCore())
                stop_sent = True
            except zmq.ZMQError:  # it is ending already
                stop_sent = False
        process.terminate(gracefully=stop_sent)
    finally:  # also when Ctrl-C interrupts the above
        process.terminate()
        channel.close()
        process.close()
