"""The worker processes of one engine, together: started at once, watched by one thread, ended together.

The idea: one thread starts the processes and then does nothing but watch them (`poll` over process descriptors and
control sockets: no CPU while nothing happens). Starting them there is no accident: the kernel kills a worker when the
*thread* that started it ends, so that thread has to be one that lives as long as the engine, not the caller's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.process.child_process_handle import ChildProcessHandle
from mvllm.executor.process.handshake import ChildStartArgs
from mvllm.executor.worker_group import WorkerGroup

_POLL_SECONDS = 0.1  # how often processes are looked at where there are no process descriptors
_GRACE_SECONDS = 2.0  # for workers that were told to stop
_BUSY_GRACE_SECONDS = 0.5  # for those that were busy with something long and may never look
_PIPE_SECONDS = 0.3  # after its death pipe was closed
_TERMINATE_SECONDS = 0.7  # after SIGTERM
_KILL_SECONDS = 5.0  # after SIGKILL, which only a process stuck in the kernel outlives


@dataclass(frozen=True)
class ProcessLaunch:
    """One process to start: what it is told, its environment, the descriptors it inherits, and its kind."""

    start: ChildStartArgs
    env: Mapping[str, str]
    fds: Sequence[int]
    kind: type[ChildProcessHandle] = ChildProcessHandle


class ChildProcessGroup(WorkerGroup):
    """See WorkerGroup.

    Args:
        launches: One per worker, in rank order.
        board: Where workers say what they do.
    """

    def __init__(self, launches: Sequence[ProcessLaunch], board: ActivityTable) -> None:
        super().__init__()
        self._workers: list[ChildProcessHandle] = []
        self._launches = launches
        self._activity_table = board
        self._launched = False
        self._launch_error: BaseException | None = None
        self._ended = False
        self._end_lock = threading.RLock()  # a garbage collection in the middle of `end` may end the same group
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="worker-monitor", daemon=True)

    @property
    def workers(self) -> Sequence[ChildProcessHandle]:
        return self._workers

    def launch(self) -> None:
        """Starts all processes; returns when they exist, not when they are ready."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._launched)
        if self._launch_error is not None:
            raise self._launch_error

    def terminate(self, *, gracefully: bool = False) -> None:
        """Ends every process, each step with a deadline: death pipe, SIGTERM, SIGKILL. Idempotent; safe at exit.

        Args:
            gracefully: The workers were told to stop, and get a moment for it first.
        """
        if not self.is_owner:
            return
        self.expect_exits()
        self.stop.set()
        with self._end_lock:
            if self._ended or not self._thread.ident:
                return
            try:
                if gracefully and self.failure is None:
                    busy = any(
                        w.activity.seconds > _BUSY_GRACE_SECONDS and not w.activity.is_idle for w in self.workers
                    )
                    self._wait_ended(_BUSY_GRACE_SECONDS if busy else _GRACE_SECONDS)
                for worker in self._running():
                    worker.close_death_pipe()
                self._wait_ended(_PIPE_SECONDS)
                self._signal_all(signal.SIGTERM)
                self._wait_ended(_TERMINATE_SECONDS)
            finally:  # also when Ctrl-C interrupts the waits above
                self._signal_all(signal.SIGKILL)
                self._wait_ended(_KILL_SECONDS)
                self._ended = True

    @property
    def is_owner(self) -> bool:
        """Whether this process started the workers, and is not a fork of the one that did."""
        return os.getpid() == self._pid

    def is_monitor_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Ends what still runs and gives back all descriptors. Nobody may wait on `stop` any more."""
        if not self.is_owner:
            return
        self.terminate()
        if self._thread.ident:
            self._thread.join(_PIPE_SECONDS)  # it reads what is closed next
        for worker in self.workers:
            if not worker.is_running:
                worker.close()
        self.stop.close()

    # --- the monitor's own thread

    def _run(self) -> None:
        try:
            for launch in self._launches:
                if self._ending:
                    break
                self._workers.append(launch.kind.launch(launch.start, launch.env, launch.fds, self._activity_table))
        except BaseException as e:  # noqa: BLE001  (raised by launch(), in the caller's thread)
            self._launch_error = e
        with self._changed:
            self._launched = True
            self._changed.notify_all()
        self._watch()

    def _watch(self) -> None:
        """Until all have ended: handshakes as they come, deaths as they happen."""
        waiting = {worker.control.fileno(): worker for worker in self.workers}
        while running := self._running():
            poll = select.poll()
            for fd in waiting:
                poll.register(fd, select.POLLIN)
            for worker in running:
                if worker.pidfd >= 0:
                    poll.register(worker.pidfd, select.POLLIN)
            blind = any(worker.pidfd < 0 for worker in running)
            ready = {fd for fd, _ in poll.poll(_POLL_SECONDS * 1e3 if blind else None)}
            for fd in ready & waiting.keys():
                self._receive_handshake(waiting.pop(fd))
            if blind or ready - waiting.keys():
                self._reap_workers(running)

    def _receive_handshake(self, worker: ChildProcessHandle) -> None:
        handshake = worker.receive_handshake()
        if handshake is None:  # closed: its death follows
            return
        if handshake.failure is not None:
            self.fail(handshake.failure.to_exception())
            return
        with self._changed:
            worker.is_ready = True
            self._changed.notify_all()

    def _reap_workers(self, running: Sequence[ChildProcessHandle]) -> None:
        with self._changed:
            dead = [worker for worker in running if worker.reap()]
            self._changed.notify_all()
        if not dead or self._ending or self.failure is not None:
            return
        time.sleep(self.GATHER_SECONDS)
        with self._changed:
            dead += [worker for worker in self._running() if worker.reap()]
            self._changed.notify_all()
        if not self._ending:
            self.fail_of_deaths(dead)

    def _running(self) -> list[ChildProcessHandle]:
        return [worker for worker in self.workers if worker.is_running]

    def _wait_ended(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._launched and not self._running(), timeout)

    def _signal_all(self, number: signal.Signals) -> None:
        with self._changed:  # nobody reaps meanwhile, so no number can belong to somebody else
            for worker in self._running():
                with contextlib.suppress(PermissionError):
                    worker.send_signal(number)
