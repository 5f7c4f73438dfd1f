"""Base of the groups of workers of one engine: reports the first failure and terminates all workers.

The first failure sets the stop signal, which ends every wait of the executor, calls the failure callbacks, and
terminates the workers. Subclasses start, watch and end them: ChildProcessGroup as child processes, mvllm-ray as actors.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mvllm.errors import EngineDeadError, WorkerDiedError, WorkerError
from mvllm.executor.message_queue import StopSignal
from mvllm.executor.worker_handle import WorkerHandle
from mvllm.logging import get_logger

logger = get_logger(__name__)

FailureCallback = Callable[[Exception], None]
Handle = TypeVar("Handle", bound=WorkerHandle)

_GRACE_SECONDS = 2.0  # for workers after the stop request
_BUSY_GRACE_SECONDS = 0.5  # where one is busy with something long and may never read the request
_JOIN_SECONDS = 0.3  # for the monitor, after the last worker has ended


class WorkerGroup(ABC, Generic[Handle]):
    """Base of the groups that executors start, watch and end. Used from any thread.

    A subclass has `_run_monitor` notice the ends of workers, and `_request_exit` and `_kill` end them.

    Args:
        workers: In rank order; a subclass that starts them itself appends each once it exists.

    Attributes:
        stop: Set by the first failure, and by `terminate`.
        failure: Why the group cannot go on, or None.
    """

    GATHER_SECONDS = 0.1
    """Several workers often die of one cause (out of memory, a lost peer): the first report waits for the others."""

    def __init__(self, workers: Sequence[Handle] = ()) -> None:
        self.stop = StopSignal()
        self.failure: Exception | None = None
        self._workers = list(workers)
        self._callbacks: list[FailureCallback] = []
        self._state_changed = threading.Condition()  # guards failure, callbacks, and everything that a monitor changes
        self._is_shutting_down = False
        self._death_report_seconds = 2 * self.GATHER_SECONDS  # how long after its effects a death may be noticed
        self._is_launched = False  # all workers exist, or as many as could be started
        self._is_terminated = False
        self._terminate_lock = threading.RLock()  # garbage collection during `terminate` may call it again
        self._pid = os.getpid()
        self._monitor = threading.Thread(target=self._run_monitor, name="worker-monitor", daemon=True)

    @property
    def workers(self) -> Sequence[Handle]:
        """In rank order; those that exist so far."""
        return self._workers

    @property
    def is_owner(self) -> bool:
        """Whether this process started the workers, and is not a fork of the one that did."""
        return os.getpid() == self._pid

    @abstractmethod
    def launch(self) -> None:
        """Starts the monitor, and the workers; returns before they are ready."""

    @abstractmethod
    def _run_monitor(self) -> None:
        """The monitor thread: records handshakes and ends of workers until all have ended."""

    @abstractmethod
    def _request_exit(self) -> None:
        """Asks the workers to end, with a deadline for each way of asking."""

    @abstractmethod
    def _kill(self) -> None:
        """Ends the workers that are left."""

    def _release(self) -> None:
        """Releases what a subclass holds beside its workers. Called once all have ended."""

    def terminate(self, *, gracefully: bool = False) -> None:
        """Ends every worker, within a deadline. Idempotent; safe at exit.

        Args:
            gracefully: The workers have been sent the stop request, and get time to end by themselves first.
        """
        if not self.is_owner:
            return
        self.expect_exits()
        self.stop.set()
        with self._terminate_lock:
            if self._is_terminated:
                return
            try:
                if gracefully and self.failure is None:
                    self._wait_ended(self._grace_seconds())
                self._request_exit()
            finally:  # also when Ctrl-C interrupts the waits above
                self._kill()
                self._is_terminated = True

    def is_monitor_thread(self) -> bool:
        """Whether the calling thread is the one that notices ends: it must not wait for any."""
        return threading.current_thread() is self._monitor

    def close(self) -> None:
        """Terminates the group and closes its descriptors. No thread may wait on `stop` any more."""
        if not self.is_owner:
            return
        self.terminate()
        if self._monitor.ident:
            self._monitor.join(_JOIN_SECONDS)  # it reads the descriptors that are closed next
        self._release()
        for worker in self.workers:
            if not worker.is_running:
                worker.close()
        self.stop.close()

    def _grace_seconds(self) -> float:
        """How long workers get to end after the stop request."""
        is_busy = any(w.activity.seconds > _BUSY_GRACE_SECONDS and not w.activity.is_idle for w in self.workers)
        return _BUSY_GRACE_SECONDS if is_busy else _GRACE_SECONDS

    def _running(self) -> list[Handle]:
        return [worker for worker in self.workers if worker.is_running]

    def _wait_ended(self, timeout: float) -> None:
        def has_ended() -> bool:
            return self._monitor.ident is None or (self._is_launched and not self._running())

        with self._state_changed:
            self._state_changed.wait_for(has_ended, timeout)

    def wait_ready(self, timeout: float) -> None:
        """Returns when every worker is ready.

        Args:
            timeout: Seconds that each activity of a worker may take.

        Raises:
            Exception: A worker's own exception, if one failed.
            WorkerDiedError: One has ended.
            WorkerStuckError: One is not ready in time.
        """
        late: list[WorkerHandle] = []
        waiting: list[Handle] = []
        with self._state_changed:
            while self.failure is None and not late:
                waiting = [worker for worker in self.workers if not worker.is_ready]
                if not waiting or self._is_shutting_down:
                    break
                late = [worker for worker in waiting if worker.activity.seconds >= timeout]
                if not late:
                    self._state_changed.wait(timeout - max(worker.activity.seconds for worker in waiting))
        if late:
            self.fail(self.stuck_error(late, timeout, "was not ready"))
        self.check()
        if waiting and self._is_shutting_down:
            raise EngineDeadError(f"{waiting[0]} was ended while it started.")

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def on_failure(self, callback: FailureCallback) -> None:
        """Registers `callback`, which is called once, with the failure: when it happens, or now if it has happened."""
        with self._state_changed:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    def fail(self, error: Exception, *, is_logged: bool = False) -> None:
        """Terminates the group because of `error`, unless it has failed or is being terminated.

        Args:
            is_logged: Whether `error` has been logged already, by another group.
        """
        with self._state_changed:
            if self.failure is not None or self._is_shutting_down:
                return
            self.failure = error
            callbacks, self._callbacks = self._callbacks, []
            self._state_changed.notify_all()
        self.stop.set()
        if not is_logged:
            logger.error("%s", str(error).partition("\n")[0])
        # In another thread: the caller may be the monitor, which has to notice the ends.
        threading.Thread(target=self._tear_down, args=(error, callbacks), name="worker-teardown", daemon=True).start()

    def fail_of_deaths(self, dead: Sequence[WorkerHandle]) -> None:
        """Terminates the group because workers have died; the error's attributes name the first of `dead`."""
        self.fail(_deaths(dead))

    def fail_with_root_cause(self, error: Exception) -> Exception:
        """Terminates the group because of `error`, or of its root cause; returns that error."""
        self.fail(self._blame_stopped_workers(self.root_cause_of(error)))
        return self.failure or error

    def root_cause_of(self, error: Exception) -> Exception:
        """The failure of the group that caused `error`, or `error`. Waits, as a death is noticed after its effects."""
        with self._state_changed:
            self._state_changed.wait_for(lambda: self.failure, self._death_report_seconds)
        return self.failure or error

    def stuck_error(self, late: Sequence[WorkerHandle], seconds: float, what: str) -> Exception:
        """The error that names the activity and the stacks of each of `late`.

        Stopped workers come first: the others may wait for them.
        """
        late = sorted(late, key=lambda worker: not worker.is_stopped)
        parts = []
        for worker in late:
            stack = worker.dump_stack()  # first: it may update the activity
            stopped = " (its process is stopped, as by SIGSTOP)" if worker.is_stopped else ""
            parts.append(f"{worker} {what} within {seconds:g} s; it is in {worker.activity}{stopped}")
            if stack:
                parts.append(f"Its stack:\n{stack.rstrip()}")
        return late[0].stuck_error("\n".join(parts))

    def stopped_workers(self) -> list[WorkerHandle]:
        """Workers whose process is stopped."""
        return [worker for worker in self.workers if worker.is_stopped]

    def _blame_stopped_workers(self, error: Exception) -> Exception:
        """An error that names the stopped workers first, if others than the failed one are stopped; otherwise `error`.

        A worker that waits for a stopped one fails at its library's time limit.
        """
        if self.failure is not None or type(error) is not WorkerError:
            return error
        stopped = [worker for worker in self.stopped_workers() if worker.rank != error.rank]
        if not stopped:
            return error
        states = "; ".join(f"{worker} is stopped, as by SIGSTOP, in {worker.activity}" for worker in stopped)
        behind = stopped[0].stuck_error(f"{states}. Meanwhile:\n{error}")
        behind.__cause__ = error
        return behind

    def expect_exits(self) -> None:
        """From now on, the end of a worker is no failure. Call it before sending the stop request."""
        with self._state_changed:
            self._is_shutting_down = True
            self._state_changed.notify_all()

    def _tear_down(self, error: Exception, callbacks: Sequence[FailureCallback]) -> None:
        for callback in callbacks:
            try:
                callback(error)
            except Exception:
                logger.exception("A failure callback raised")
        self.terminate()


def _deaths(dead: Sequence[WorkerHandle]) -> Exception:
    """One error for all of `dead`; its attributes name the first."""
    first = dead[0].death_error()
    if len(dead) > 1 and isinstance(first, WorkerDiedError):
        first.args = ("\n".join([str(first), *(worker.describe_exit() for worker in dead[1:])]),)
    return first
