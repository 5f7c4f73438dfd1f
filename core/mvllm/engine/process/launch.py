"""The child processes of the engine other than workers: engine cores, the coordinator, API servers.

Each is a ChildProcessGroup of one: a monitor thread starts the process (which dies with that thread), receives its
handshake, notices its exit, and ends it as it would end workers. The errors differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.engine.process.core_handshake import CoreHandshake, CoreReady, EngineCoreStartArgs
from mvllm.engine.process.zmq_channel import ChannelAddress
from mvllm.errors import EngineDeadError
from mvllm.executor.config_codec import encode_config
from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.child_process_group import ChildProcessGroup, ProcessLaunch
from mvllm.executor.process.child_process_handle import ChildProcessHandle
from mvllm.executor.process.handshake import ChildStartArgs
from mvllm.executor.worker_group import WorkerGroup
from mvllm.messages.process_failure import ProcessFailure

TIMEOUT_MARGIN_SECONDS = 15.0
"""Added to the executor's own time limits for a core: its report names the late worker, so it must come first."""

_MAX_CALLS_PER_PHASE = 3  # calls of workers in a phase of a core's start, each limited by `start_timeout`


class CoreHandle(ChildProcessHandle):
    """The handle of an engine core process in its parent; the base of the other kinds'."""

    module = "mvllm.engine.process.engine_core_proc"
    handshake_type = CoreHandshake
    ready: CoreReady | None = None

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def receive_handshake(self) -> CoreHandshake | None:
        handshake = super().receive_handshake()
        assert handshake is None or isinstance(handshake, CoreHandshake)
        if handshake is not None:
            self.ready = handshake.ready
        return handshake

    def death_error(self) -> Exception:
        """The failure that the process sent; without one, an error with its exit status and last activity."""
        last = self._read_crash_report()
        return EngineDeadError(self.describe_exit()) if last is None else last.to_exception()

    def stuck_error(self, message: str) -> EngineDeadError:
        return EngineDeadError(message)

    def _read_crash_report(self) -> ProcessFailure | None:
        """The failure among the unread messages of the process, which has exited."""
        self.control.setblocking(False)
        while (handshake := super().receive_handshake()) is not None:
            if handshake.failure is not None:
                return handshake.failure
        return None


class ChildProcess(ChildProcessGroup):
    """One child process of the engine: an engine core, the coordinator, or an API server.

    Args:
        start: Its start arguments; the parent's state is added.
        fds: The descriptors that it inherits for them.
        kind: The class of its handle, which names its program.
        env: Environment variables to set.

    Attributes:
        activity_table: The table of one row to which it writes its activity.
    """

    def __init__(
        self, start: ChildStartArgs, fds: Sequence[int], kind: type[CoreHandle], env: Mapping[str, str] | None = None
    ) -> None:
        self.activity_table = ActivityTable.create(1)
        start = start.with_parent_state(self.activity_table.fd)
        launch = ProcessLaunch(start, env or {}, (start.stack_fd, self.activity_table.fd, *fds), kind)
        super().__init__([launch], self.activity_table)

    def wait_handshake(self, timeout: float) -> CoreReady | None:
        """Returns when the process is ready: what an engine core reports about itself, None for another process.

        Args:
            timeout: Seconds that each phase of its start may take.

        Raises:
            Exception: Its own exception, if it failed; EngineDeadError, if it exited or a phase took too long.
        """
        self.wait_ready(timeout)
        return self._handle.ready

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit status, minus a signal's number; None while it runs."""
        return self._handle.exit_code

    @property
    def is_usable(self) -> bool:
        """Whether it is ready and has not failed."""
        return self.failure is None and bool(self.workers) and self._handle.is_ready

    def dump_stack(self) -> str:
        """The stacks of its threads, as written within half a second; may be empty."""
        return self._handle.dump_stack()

    def unresponsive_error(self, seconds: float, what: str) -> EngineDeadError:
        """The error that names the process, its activity and its stacks."""
        return EngineDeadError(str(self.stuck_error([self._handle], seconds, what)))

    def close(self) -> None:
        """Ends the process and closes all descriptors. Idempotent; does nothing in a fork of the parent."""
        super().close()
        if self.is_owner:
            self.activity_table.close()

    @property
    def _handle(self) -> CoreHandle:
        handle = self.workers[0]
        assert isinstance(handle, CoreHandle)
        return handle


@contextlib.contextmanager
def failing_together(processes: Sequence[WorkerGroup]) -> Iterator[None]:
    """Within the context, the failure of one process fails all of them, so every wait for one of them raises at once.

    Args:
        processes: All launched already.
    """
    is_over = False

    def fail_all(error: Exception) -> None:
        if not is_over:
            for process in processes:
                process.fail(error, is_logged=True)

    for process in processes:
        process.on_failure(fail_all)
    try:
        yield
    finally:
        is_over = True


class CoreChildProcess(ChildProcess):
    """One engine core process.

    Args:
        name: Its name, for instance `EngineCore`.
        config: The resolved configuration.
        platform: The platform's name.
        addresses: The sockets of its front ends; the first is in the process that starts the core.
        coordinator_fd: Its socket to the coordinator, where there is one.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        platform: str,
        addresses: Sequence[ChannelAddress],
        coordinator_fd: int | None = None,
    ) -> None:
        self._start_seconds = start_timeout_seconds(config.parallel)
        start = EngineCoreStartArgs(
            name=name,
            platform=platform,
            config=encode_config(config),
            addresses=list(addresses),
            coordinator_fd=coordinator_fd,
        )
        super().__init__(start, () if coordinator_fd is None else (coordinator_fd,), CoreHandle)

    def wait_started(self) -> CoreReady:
        """Returns when the core waits for requests.

        Raises:
            Exception: Its own exception, if it failed; EngineDeadError, if it exited or a phase took too long.
        """
        ready = self.wait_handshake(self._start_seconds)
        assert ready is not None
        return ready


def start_timeout_seconds(parallel: ParallelConfig) -> float:
    """The time limit of a phase of an engine core's start, in seconds: `start_timeout`, and more with worker processes,
    for which the core enforces `start_timeout` itself.
    """
    if parallel.world_size == 1 and parallel.distributed_executor_backend in (None, "uni"):
        return parallel.start_timeout
    return _MAX_CALLS_PER_PHASE * parallel.start_timeout + TIMEOUT_MARGIN_SECONDS
