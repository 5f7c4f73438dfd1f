"""The workers of one engine, together, wherever they run: the first failure wins.

It sets the stop signal, which ends every wait of the executor, tells whoever asked to be told, and ends the workers.
How workers are started, watched and ended is for subclasses, such as ProcessGroup.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from mvllm.errors import WorkerDiedError, WorkerError
from mvllm.executor.message_queue import StopSignal
from mvllm.executor.process.activity_table import Activity
from mvllm.logging import get_logger

logger = get_logger(__name__)

FailureCallback = Callable[[Exception], None]


class WorkerView(Protocol):
    """One worker, as the executor sees it. As text: its name, rank and process id.

    Attributes:
        name, rank, pid: Who it is.
        is_ready: It waits for requests.
        activity: What it said last that it is doing.
    """

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def activity(self) -> Activity: ...
    @property
    def is_stopped(self) -> bool:
        """Whether the kernel lets it do nothing, as far as is known."""
        ...

    def dump_stack(self) -> str:
        """The stacks of all its threads, most recent call first; what there is after a moment."""
        ...

    def death_error(self) -> Exception:
        """The error that says how it ended and what it was doing."""
        ...

    def describe_exit(self) -> str:
        """How it ended and what it was doing."""
        ...

    def stuck_error(self, message: str) -> Exception:
        """The error for its not having done in time what `message` says."""
        ...


class WorkerGroup(ABC):
    """Used from any thread.

    Attributes:
        stop: Set by the first failure, and by `end`.
        failure: Why the group cannot go on, or None.
    """

    GATHER_SECONDS = 0.1
    """Several workers often die of one cause (out of memory, a lost peer): the first report waits for the others."""

    def __init__(self) -> None:
        self.stop = StopSignal()
        self.failure: Exception | None = None
        self._callbacks: list[FailureCallback] = []
        self._changed = threading.Condition()  # guards failure, callbacks, and everything that a monitor changes
        self._ending = False
        self._cause_seconds = 2 * self.GATHER_SECONDS  # how much later than its effects a death may come to light

    @property
    @abstractmethod
    def workers(self) -> Sequence[WorkerView]:
        """In rank order; those that exist so far."""

    @abstractmethod
    def terminate(self, *, gracefully: bool = False) -> None:
        """Ends every worker, within a deadline. Idempotent; safe at exit.

        Args:
            gracefully: The workers were told to stop, and get a moment for it first.
        """

    @abstractmethod
    def is_monitor_thread(self) -> bool:
        """Whether the calling thread is the one that notices ends: it must not wait for any."""

    @abstractmethod
    def close(self) -> None:
        """Ends what still runs and gives back whatever the group holds. Nobody may wait on `stop` any more."""

    def wait_ready(self, timeout: float) -> None:
        """Returns when every worker waits for requests.

        Args:
            timeout: Seconds that each thing a worker says it is doing may take.

        Raises:
            Exception: A worker's own exception, if one failed.
            WorkerDiedError: One has ended.
            WorkerStuckError: One is not ready in time.
        """
        late: list[WorkerView] = []
        with self._changed:
            while self.failure is None and not late:
                waiting = [worker for worker in self.workers if not worker.is_ready]
                if not waiting:
                    break
                late = [worker for worker in waiting if worker.activity.seconds >= timeout]
                if not late:
                    self._changed.wait(timeout - max(worker.activity.seconds for worker in waiting))
        if late:
            self.fail(self.stuck_error(late, timeout, "was not ready"))
        self.check()

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def on_failure(self, callback: FailureCallback) -> None:
        """Has `callback` called with the failure: when it happens, or at once when it has happened. Never twice."""
        with self._changed:
            if self.failure is None:
                self._callbacks.append(callback)
                return
        callback(self.failure)

    def fail(self, error: Exception, *, is_logged: bool = False) -> None:
        """Ends the group because of `error`, unless it has failed or is being ended already.

        Args:
            is_logged: The error is another group's, which has logged it.
        """
        with self._changed:
            if self.failure is not None or self._ending:
                return
            self.failure = error
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        self.stop.set()
        if not is_logged:
            logger.error("%s", str(error).partition("\n")[0])
        # In a thread of its own: callers may be the monitor, without which no end is noticed.
        threading.Thread(target=self._tear_down, args=(error, callbacks), name="worker-teardown", daemon=True).start()

    def fail_of_deaths(self, dead: Sequence[WorkerView]) -> None:
        """Ends the group because workers have died; the first of them is named in the error's attributes."""
        self.fail(_deaths(dead))

    def fail_with_root_cause(self, error: Exception) -> Exception:
        """Ends the group because of `error`, or of what caused it; returns that."""
        self.fail(self._blame_stopped_workers(self.root_cause_of(error)))
        return self.failure or error

    def root_cause_of(self, error: Exception) -> Exception:
        """The failure behind `error`, if there is one: a death comes to light a moment after what it did to others."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, self._cause_seconds)
        return self.failure or error

    def stuck_error(self, late: Sequence[WorkerView], seconds: float, what: str) -> Exception:
        """The error that says what each of `late` is doing, with its stacks.

        Stopped workers come first: others wait for them.
        """
        late = sorted(late, key=lambda worker: not worker.is_stopped)
        parts = []
        for worker in late:
            stack = worker.dump_stack()  # first: it may bring news of what the worker does
            stopped = " (its process is stopped, as by SIGSTOP)" if worker.is_stopped else ""
            parts.append(f"{worker} {what} within {seconds:g} s; it is in {worker.activity}{stopped}")
            if stack:
                parts.append(f"Its stack:\n{stack.rstrip()}")
        return late[0].stuck_error("\n".join(parts))

    def stopped_workers(self) -> list[WorkerView]:
        """Workers that the kernel lets do nothing."""
        return [worker for worker in self.workers if worker.is_stopped]

    def _blame_stopped_workers(self, error: Exception) -> Exception:
        """`error`, or where a worker has failed while others are stopped, an error that names those first: a worker
        that waits for a stopped one fails at its library's time limit."""
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
        """From now on, a worker that ends is no failure. Call before telling workers to stop."""
        self._ending = True

    def _tear_down(self, error: Exception, callbacks: Sequence[FailureCallback]) -> None:
        for callback in callbacks:
            try:
                callback(error)
            except Exception:
                logger.exception("A failure callback raised")
        self.terminate()


def _deaths(dead: Sequence[WorkerView]) -> Exception:
    """One error for all that have died; the first is named in its attributes."""
    first = dead[0].death_error()
    if len(dead) > 1 and isinstance(first, WorkerDiedError):
        first.args = ("\n".join([str(first), *(worker.describe_exit() for worker in dead[1:])]),)
    return first
