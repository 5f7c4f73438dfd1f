"""An engine core's process as the front end sees it. Whoever talks to it, in whatever way, starts and ends it here.

The machinery is that of worker processes: one monitor thread starts the process (which dies with that thread), takes
its handshake, watches for its death and ends it by the same ladder. What differs is what is said of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.engine.process.core_handshake import CoreHandshake, CoreReady, EngineCoreStartArgs
from mvllm.engine.process.zmq_channel import ChannelAddress
from mvllm.errors import EngineDeadError
from mvllm.executor.config_codec import encode_config
from mvllm.executor.message_queue import StopSignal
from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.child_process_group import ChildProcessGroup, ProcessLaunch
from mvllm.executor.process.child_process_handle import ChildProcessHandle, ChildStartArgs
from mvllm.executor.process.process_utils import anonymous_file, module_search_path
from mvllm.messages.process_failure import ProcessFailure

TIMEOUT_MARGIN_SECONDS = 15.0
"""What a core gets beyond the limits that its executor enforces: the executor knows better which worker is late."""

_MAX_CALLS_PER_PHASE = 3  # at most, of a core's start: each may take as long as `start_timeout` says


class CoreHandle(ChildProcessHandle):
    """The process."""

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
        """What it said before it ended; or, where it could say nothing, how it ended and what it was doing."""
        last = self._read_crash_report()
        return EngineDeadError(self.describe_exit()) if last is None else last.to_exception()

    def stuck_error(self, message: str) -> EngineDeadError:
        return EngineDeadError(message)

    def _read_crash_report(self) -> ProcessFailure | None:
        """What lies in the socket of the process, which has ended."""
        self.control.setblocking(False)
        while (handshake := super().receive_handshake()) is not None:
            if handshake.failure is not None:
                return handshake.failure
        return None


@dataclass(frozen=True)
class ProcessStartArgs:
    """What every process is told; see EngineCoreStartArgs."""

    activity_fd: int
    stack_fd: int
    sys_path: list[str]
    python_path: str | None
    log_level: str


class ChildProcess:
    """A process of the engine's own that this one starts: an engine core, or one that serves several of them.

    Args:
        make_start: Makes what it is told, of the descriptors of its board and its stacks.
        fds: Other descriptors that it inherits.
        kind: What it runs.
    """

    def __init__(
        self, make_start: Callable[[ProcessStartArgs], ChildStartArgs], fds: Sequence[int], kind: type[CoreHandle]
    ) -> None:
        self._pid = os.getpid()
        self.activity_table = ActivityTable.create(1)
        stack_fd = anonymous_file("stacks")
        common = ProcessStartArgs(
            activity_fd=self.activity_table.fd,
            stack_fd=stack_fd,
            sys_path=module_search_path(),
            python_path=os.environ.get("PYTHONPATH"),
            log_level=logging.getLevelName(logging.getLogger("mvllm").getEffectiveLevel()),
        )
        launch = ProcessLaunch(make_start(common), {}, (stack_fd, self.activity_table.fd, *fds), kind)
        self._group = ChildProcessGroup([launch], self.activity_table)

    def launch(self) -> None:
        """Starts the process; returns when it exists."""
        self._group.launch()

    def set_phase(self, text: str) -> None:
        """Says what the process does from now on, where its parent knows first."""
        self.activity_table.write(0, text)

    def wait_handshake(self, timeout: float) -> CoreReady | None:
        """Returns when it can do its work: what it says of itself.

        Args:
            timeout: Seconds that each phase of its start may take.

        Raises:
            Exception: Its own exception, if it failed; EngineDeadError, if it ended or does not get on.
        """
        self._group.wait_ready(timeout)
        return self._handle.ready

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit status, minus a signal's number; None while it runs."""
        return self._handle.exit_code

    @property
    def last_heartbeat(self) -> float:
        """When it last said so, by the monotonic clock, in seconds."""
        return self.activity_table.since(0)

    @property
    def stop(self) -> StopSignal:
        """Set when the process can no longer be used."""
        return self._group.stop

    @property
    def is_usable(self) -> bool:
        """Whether it is ready and has not failed."""
        return self._group.failure is None and bool(self._group.workers) and self._handle.is_ready

    @property
    def failure(self) -> Exception | None:
        """Why the process can no longer be used, or None."""
        return self._group.failure

    def check_usable(self) -> None:
        """Raises the failure, if there is one."""
        self._group.check()

    def terminate_with_error(self, error: Exception) -> Exception:
        """Ends the process because of `error`, or of what was behind it; returns that."""
        return self._group.fail_with_root_cause(error)

    def stuck(self, seconds: float, what: str) -> EngineDeadError:
        """The error that names it, what it is doing, and where it is in its code."""
        return EngineDeadError(str(self._group.stuck_error([self._handle], seconds, what)))

    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        """Has `callback` called with the failure, in another thread; at once where it has happened. Never twice."""
        self._group.on_failure(callback)

    def fail_with(self, error: Exception) -> None:
        """Ends the process because of the failure of another, without which it is of no use."""
        self._group.fail(error, is_logged=True)

    def is_monitor_thread(self) -> bool:
        """Whether the calling thread is the one that notices the process' end: it must not wait for that."""
        return self._group.is_monitor_thread()

    def terminate(self, *, told: bool) -> None:
        """Ends the process: nothing of it is left when this returns. Idempotent.

        Args:
            told: It was told to stop, and gets a moment for it first.
        """
        if os.getpid() != self._pid:  # a fork of the front end's process
            return
        self._group.terminate(gracefully=told)

    def expect_exit(self) -> None:
        """From now on, its end is no failure."""
        self._group.expect_exits()

    def close(self) -> None:
        """Ends the process and gives back all descriptors. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._group.close()
        self.activity_table.close()

    @property
    def _handle(self) -> CoreHandle:
        handle = self._group.workers[0]
        assert isinstance(handle, CoreHandle)
        return handle


@contextlib.contextmanager
def failing_together(processes: Sequence[ChildProcess]) -> Iterator[None]:
    """Within, the failure of one process fails all of them: every wait for one of them raises at once.

    Args:
        processes: All launched.
    """
    is_over = False

    def fail_all(error: Exception) -> None:
        if not is_over:
            for process in processes:
                process.fail_with(error)

    for process in processes:
        process.on_failure(fail_all)
    try:
        yield
    finally:
        is_over = True


class CoreChildProcess(ChildProcess):
    """One engine core's process.

    Args:
        name: What it is called, for instance `EngineCore`.
        config: The settled configuration.
        platform: The platform's name.
        addresses: Where it finds its front ends; the first is that of the process that starts it.
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

        def make_start(common: ProcessStartArgs) -> EngineCoreStartArgs:
            return EngineCoreStartArgs(
                name=name,
                platform=platform,
                config=encode_config(config),
                addresses=list(addresses),
                coordinator_fd=coordinator_fd,
                **asdict(common),
            )

        super().__init__(make_start, () if coordinator_fd is None else (coordinator_fd,), CoreHandle)

    def wait_ready(self) -> CoreReady:
        """Returns when it waits for requests.

        Raises:
            Exception: Its own exception, if it failed; EngineDeadError, if it ended or does not get on.
        """
        ready = self.wait_handshake(self._start_seconds)
        assert ready is not None
        return ready


def start_timeout_seconds(parallel: ParallelConfig) -> float:
    """What a phase of an engine core's start may take: `start_timeout`, and more where workers have processes of their
    own, whose limit the core enforces.
    """
    if parallel.world_size == 1 and parallel.distributed_executor_backend in (None, "uni"):
        return parallel.start_timeout
    return _MAX_CALLS_PER_PHASE * parallel.start_timeout + TIMEOUT_MARGIN_SECONDS
