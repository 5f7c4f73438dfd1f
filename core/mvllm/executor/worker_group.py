"""The worker processes of one engine, together: started at once, watched by one thread, ended together.

The idea: one thread starts the processes and then does nothing but watch them (`poll` over process descriptors and
control sockets: no CPU while nothing happens). Starting them there is no accident: the kernel kills a worker when the
*thread* that started it ends, so that thread has to be one that lives as long as the engine, not the caller's.

The first failure wins. It sets the stop signal, which ends every wait of the executor, and then ends the processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mvllm.errors import WorkerDiedError
from mvllm.executor.message_queue import StopSignal
from mvllm.executor.status_board import StatusBoard
from mvllm.executor.worker_handle import ProcessStart, WorkerHandle
from mvllm.logging import get_logger

logger = get_logger(__name__)

FailureCallback = Callable[[Exception], None]

_GATHER_SECONDS = 0.1  # deaths come in company (out of memory, a lost peer): the first report waits for the others
_LOOK_SECONDS = 0.1  # how often processes are looked at where there are no process descriptors
_GRACE_SECONDS = 2.0  # for workers that were told to stop
_BUSY_GRACE_SECONDS = 0.5  # for those that were busy with something long and may never look
_PIPE_SECONDS = 0.3  # after its death pipe was closed
_TERMINATE_SECONDS = 0.7  # after SIGTERM
_KILL_SECONDS = 5.0  # after SIGKILL, which only a process stuck in the kernel outlives


@dataclass(frozen=True)
class Launch:
    """One process to start: what it is told, its environment, the descriptors it inherits, and its kind."""

    start: ProcessStart
    env: Mapping[str, str]
    fds: Sequence[int]
    kind: type[WorkerHandle] = WorkerHandle


class WorkerGroup:
    """Used from any thread.

    Args:
        launches: One per worker, in rank order.
        board: Where workers say what they do.

    Attributes:
        stop: Set by the first failure, and by `end`.
        failure: Why the group cannot go on, or None.
    """

    def __init__(self, launches: Sequence[Launch], board: StatusBoard) -> None:
        self.stop = StopSignal()
        self.failure: Exception | None = None
        self.workers: list[WorkerHandle] = []
        self._launches = launches
        self._board = board
        self._callbacks: list[FailureCallback] = []
        self._changed = threading.Condition()  # guards failure, callbacks, and everything that _watch changes
        self._launched = False
        self._launch_error: BaseException | None = None
        self._ending = False
        self._ended = False
        self._end_lock = threading.Lock()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="worker-monitor", daemon=True)

    def launch(self) -> None:
        """Starts all processes; returns when they exist, not when they are ready."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._launched)
        if self._launch_error is not None:
            raise self._launch_error

    def wait_ready(self, timeout: float) -> None:
        """Returns when every worker waits for requests.

        Args:
            timeout: Seconds that each thing a worker says it is doing may take.

        Raises:
            Exception: A worker's own exception, if one failed.
            WorkerDiedError: One has ended.
            WorkerStuckError: One is not ready in time.
        """
        late: list[WorkerHandle] = []
        with self._changed:
            while self.failure is None and not late:
                waiting = [worker for worker in self.workers if not worker.is_ready]
                if not waiting:
                    break
                late = [worker for worker in waiting if worker.activity.seconds >= timeout]
                if not late:
                    self._changed.wait(timeout - max(worker.activity.seconds for worker in waiting))
        if late:
            self.fail(self.stuck(late, timeout, "was not ready"))
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

    def fail(self, error: Exception) -> None:
        """Ends the group because of `error`, unless it has failed or is being ended already."""
        with self._changed:
            if self.failure is not None or self._ending:
                return
            self.failure = error
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        self.stop.set()
        logger.error("%s", str(error).partition("\n")[0])
        # In a thread of its own: callers may be the monitor, without which no end is noticed.
        threading.Thread(target=self._tear_down, args=(error, callbacks), name="worker-teardown", daemon=True).start()

    def settle(self, error: Exception) -> Exception:
        """Ends the group because of `error`, or of what caused it; returns that."""
        self.fail(self.cause_of(error))
        return self.failure or error

    def cause_of(self, error: Exception) -> Exception:
        """The failure behind `error`, if there is one: a death comes to light a moment after what it did to others."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, 2 * _GATHER_SECONDS)
        return self.failure or error

    def stuck(self, late: Sequence[WorkerHandle], seconds: float, what: str) -> Exception:
        """The error that says what each of `late` is doing, with its stacks."""
        parts = []
        for worker in late:
            stopped = " (its process is stopped, as by SIGSTOP)" if worker.is_stopped else ""
            parts.append(f"{worker} {what} within {seconds:g} s; it is in {worker.activity}{stopped}")
            if stack := worker.dump_stack():
                parts.append(f"Its stack:\n{stack.rstrip()}")
        return late[0].stuck("\n".join(parts))

    def expect_ends(self) -> None:
        """From now on, a worker that ends is no failure. Call before telling workers to stop."""
        self._ending = True

    def end(self, *, gracefully: bool = False) -> None:
        """Ends every process, each step with a deadline: death pipe, SIGTERM, SIGKILL. Idempotent; safe at exit.

        Args:
            gracefully: The workers were told to stop, and get a moment for it first.
        """
        if os.getpid() != self._pid:  # a fork of the engine's process: the workers are not its own
            return
        self.expect_ends()
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

    def close(self) -> None:
        """Ends what still runs and gives back all descriptors. Nobody may wait on `stop` any more."""
        if os.getpid() != self._pid:
            return
        self.end()
        if self._thread.ident:
            self._thread.join(_PIPE_SECONDS)  # it reads what is closed next
        for worker in self.workers:
            if not worker.is_running:
                worker.close()
        self.stop.close()

    def _tear_down(self, error: Exception, callbacks: Sequence[FailureCallback]) -> None:
        for callback in callbacks:
            try:
                callback(error)
            except Exception:
                logger.exception("A failure callback raised")
        self.end()

    # --- the monitor's own thread

    def _run(self) -> None:
        try:
            for launch in self._launches:
                if self._ending:
                    break
                self.workers.append(launch.kind.launch(launch.start, launch.env, launch.fds, self._board))
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
            ready = {fd for fd, _ in poll.poll(_LOOK_SECONDS * 1e3 if blind else None)}
            for fd in ready & waiting.keys():
                self._take_handshake(waiting.pop(fd))
            if blind or ready - waiting.keys():
                self._take_deaths(running)

    def _take_handshake(self, worker: WorkerHandle) -> None:
        handshake = worker.receive_handshake()
        if handshake is None:  # closed: its death follows
            return
        if handshake.failure is not None:
            self.fail(handshake.failure.to_exception())
            return
        with self._changed:
            worker.is_ready = True
            self._changed.notify_all()

    def _take_deaths(self, running: Sequence[WorkerHandle]) -> None:
        with self._changed:
            dead = [worker for worker in running if worker.reap()]
            self._changed.notify_all()
        if not dead or self._ending or self.failure is not None:
            return
        time.sleep(_GATHER_SECONDS)
        with self._changed:
            dead += [worker for worker in self._running() if worker.reap()]
            self._changed.notify_all()
        if not self._ending:
            self.fail(_deaths(dead))

    def _running(self) -> list[WorkerHandle]:
        return [worker for worker in self.workers if worker.is_running]

    def _wait_ended(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._launched and not self._running(), timeout)

    def _signal_all(self, number: signal.Signals) -> None:
        with self._changed:  # nobody reaps meanwhile, so no number can belong to somebody else
            for worker in self._running():
                with contextlib.suppress(PermissionError):
                    worker.send_signal(number)


def _deaths(dead: Sequence[WorkerHandle]) -> Exception:
    """One error for all that have died; the first is named in its attributes."""
    first = dead[0].death()
    if len(dead) > 1 and isinstance(first, WorkerDiedError):
        first.args = ("\n".join([str(first), *(worker.describe_death() for worker in dead[1:])]),)
    return first
