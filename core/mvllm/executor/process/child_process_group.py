"""The child processes of one engine: started together, watched by one monitor thread, terminated together.

The monitor thread starts the processes and then polls process descriptors and control sockets, which uses no CPU while
nothing happens. It has to be the thread that starts them: the kernel kills a worker when the *thread* that started it
ends, so that thread must live as long as the engine, which the caller's thread may not.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.child_process_handle import ChildProcessHandle
from mvllm.executor.process.handshake import ChildStartArgs
from mvllm.executor.worker_group import WorkerGroup

_POLL_SECONDS = 0.1  # interval of checks where there are no process descriptors
_PIPE_SECONDS = 0.3  # after the death pipe was closed
_TERMINATE_SECONDS = 0.7  # after SIGTERM
_KILL_SECONDS = 5.0  # after SIGKILL, which only a process stuck in the kernel outlives


@dataclass(frozen=True)
class ProcessLaunch:
    """One process to start: start arguments, environment, inherited descriptors, and class of its handle."""

    start: ChildStartArgs
    env: Mapping[str, str]
    fds: Sequence[int]
    kind: type[ChildProcessHandle] = ChildProcessHandle


class ChildProcessGroup(WorkerGroup[ChildProcessHandle]):
    """Starts, watches and terminates child processes. See WorkerGroup.

    Args:
        launches: One per worker, in rank order.
        activity_table: Where workers write their activity.
    """

    def __init__(self, launches: Sequence[ProcessLaunch], activity_table: ActivityTable) -> None:
        super().__init__()
        self._launches = launches
        self._activity_table = activity_table
        self._launch_error: BaseException | None = None

    def launch(self) -> None:
        """Starts all processes; returns when they exist, not when they are ready."""
        self._monitor.start()
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._is_launched)
        if self._launch_error is not None:
            raise self._launch_error

    def _request_exit(self) -> None:
        for worker in self._running():
            worker.close_death_pipe()
        self._wait_ended(_PIPE_SECONDS)
        self._signal_all(signal.SIGTERM)
        self._wait_ended(_TERMINATE_SECONDS)

    def _kill(self) -> None:
        self._signal_all(signal.SIGKILL)
        self._wait_ended(_KILL_SECONDS)

    # --- in the monitor thread

    def _run_monitor(self) -> None:
        try:
            for launch in self._launches:
                if self._is_shutting_down:
                    break
                self._workers.append(launch.kind.launch(launch.start, launch.env, launch.fds, self._activity_table))
        except BaseException as e:  # noqa: BLE001  (raised by launch(), in the caller's thread)
            self._launch_error = e
        with self._state_changed:
            self._is_launched = True
            self._state_changed.notify_all()
        self._watch()

    def _watch(self) -> None:
        """Receives handshakes and reaps ended processes until all have ended."""
        waiting = {worker.control.fileno(): worker for worker in self.workers}
        while running := self._running():
            poll = select.poll()
            for fd in waiting:
                poll.register(fd, select.POLLIN)
            for worker in running:
                if worker.pidfd >= 0:
                    poll.register(worker.pidfd, select.POLLIN)
            has_no_pidfd = any(worker.pidfd < 0 for worker in running)
            ready = {fd for fd, _ in poll.poll(_POLL_SECONDS * 1e3 if has_no_pidfd else None)}
            for fd in ready & waiting.keys():
                self._receive_handshake(waiting.pop(fd))
            if has_no_pidfd or ready - waiting.keys():
                self._reap_workers(running)

    def _receive_handshake(self, worker: ChildProcessHandle) -> None:
        handshake = worker.receive_handshake()
        if handshake is None:  # the socket is closed: the process ends next
            return
        if handshake.failure is not None:
            self.fail(handshake.failure.to_exception())
            return
        with self._state_changed:
            worker.is_ready = True
            self._state_changed.notify_all()

    def _reap_workers(self, running: Sequence[ChildProcessHandle]) -> None:
        with self._state_changed:
            dead = [worker for worker in running if worker.reap()]
            self._state_changed.notify_all()
        if not dead or self._is_shutting_down or self.failure is not None:
            return
        time.sleep(self.GATHER_SECONDS)
        with self._state_changed:
            dead += [worker for worker in self._running() if worker.reap()]
            self._state_changed.notify_all()
        if not self._is_shutting_down:
            self.fail_of_deaths(dead)

    def _signal_all(self, number: signal.Signals) -> None:
        with self._state_changed:  # no process is reaped meanwhile, so no pid can have been reused
            for worker in self._running():
                with contextlib.suppress(PermissionError):
                    worker.send_signal(number)
