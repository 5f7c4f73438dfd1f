"""The actors of one engine as workers: watched by one thread, ended together.

The thread asks Ray a few times a second, without waiting inside it, whether an actor's `run` has come back, and sleeps
on the sockets of the actors on this node, whose death closes them at once. An actor or a node that is lost is a dead
worker, and takes the same way as one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from mvllm.extension_api import (
    Activity,
    ActivityTable,
    EngineDeadError,
    Handshake,
    PeerDiedError,
    StackFile,
    StopSignal,
    WorkerDiedError,
    WorkerGroup,
    WorkerStuckError,
    is_stopped,
    open_pidfd,
)
from mvllm_ray.cluster import RayJob, ready, summary_of
from mvllm_ray.worker import RayWorkerIdentity, RayWorkerReport

_POLL_SECONDS = 0.25  # how often Ray is asked
_ACCOUNT_SECONDS = 2.0  # how much later than a closed connection Ray may say what happened
_GRACE_SECONDS = 2.0  # for workers that were told to stop
_BUSY_GRACE_SECONDS = 0.5  # for those that were busy with something long and may never look
_KILL_SECONDS = 1.5  # after ray.kill, and after SIGKILL
_REPORT_SECONDS = 2.0  # for an actor on another node to say what it is doing


class RayWorkerHandle:
    """One actor, as the executor sees it. Used by the group.

    Attributes:
        name, rank, pid: Who it is; the process id is its node's.
        node_id, node_ip: Ray's name and address of its node.
        is_near: It is on the engine's node, and reached through shared memory.
        is_ready: It waits for requests.
        has_ended: Its loop has come back, or its process is gone.
        stack_fd: Where a near worker's stacks go; -1 for a far one.
        account: What is known about its end.
        actor: Ray's handle.
        control: Closed by the kernel when a near worker's process ends.
    """

    def __init__(
        self, name: str, rank: int, identity: RayWorkerIdentity, actor: Any, stack_fd: int, board: ActivityTable
    ) -> None:
        self.name = name
        self.rank = rank
        self.pid = identity.pid
        self.node_id = identity.node_id
        self.node_ip = identity.node_ip
        self.is_near = stack_fd >= 0
        self.is_ready = False
        self.has_ended = False
        self.account = ""
        self.actor = actor
        self.control: socket.socket | None = None
        self._pidfd = -1
        self.stack_fd = stack_fd
        self._stacks = StackFile(stack_fd)
        self._activity_table = board

    def connected(self, control: socket.socket, pid: int | None) -> None:
        """A near worker has its ends of the queues. `pid` is its process id as the kernel says, if the kernel does."""
        self.control = control
        if pid is not None:
            self._pidfd = open_pidfd(pid)

    @property
    def activity(self) -> Activity:
        """What a near worker said last, or what a far one was asked for last."""
        return self._activity_table.read(self.rank)

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, pid {self.pid} on node {self.node_ip})"

    def dump_stack(self) -> str:
        """A near worker's stacks come by signal, even from inside native code; a far one has to be able to answer."""
        if self._pidfd >= 0:
            return self._stacks.read_after(lambda: self.send_signal(StackFile.SIGNAL))
        if not ray.is_initialized():
            return ""
        ref = self.actor.report.remote()
        try:
            if not ready([ref], _REPORT_SECONDS):
                return ""
            report = msgspec.msgpack.decode(ray.get(ref), type=RayWorkerReport)
        except RayError:
            return ""
        self._activity_table.write(self.rank, report.text, step=-1 if report.step is None else report.step)
        return report.stacks

    @property
    def is_stopped(self) -> bool:
        return self._pidfd >= 0 and is_stopped(self.pid)

    def death_error(self) -> WorkerDiedError:
        message, activity = self.describe_exit(), str(self.activity)
        return WorkerDiedError(message, rank=self.rank, pid=self.pid, activity=activity, exit_code=None)

    def describe_exit(self) -> str:
        message = f"{self} was lost {self.activity.during()}. {self.account or 'Its process has ended.'}"
        if stack := self._stacks.text():
            message += f"\nIts stack:\n{stack.rstrip()}"
        return message

    def stuck_error(self, message: str) -> WorkerStuckError:
        return WorkerStuckError(message, rank=self.rank, pid=self.pid, activity=str(self.activity))

    def close(self) -> None:
        """Gives back its descriptors, after its end. Idempotent."""
        if self.control is not None:
            self.control.close()
        self._stacks.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing when the process has ended, or is on another node."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, number)


class RayWorkerGroup(WorkerGroup):
    """See WorkerGroup.

    Args:
        job: The actors' claim on the cluster, which the group ends and gives back.
        workers: In rank order.
        board: Where near workers say what they do, and the executor what it asked far ones for.
    """

    def __init__(self, job: RayJob, workers: Sequence[RayWorkerHandle], board: ActivityTable) -> None:
        super().__init__()
        self._job = job
        self._workers = workers
        self._activity_table = board
        self._wake = StopSignal()  # ends the monitor
        self._ended = False
        self._end_lock = threading.RLock()  # a garbage collection in the middle of `end` may end the same group
        self._pid = os.getpid()
        self._watched: dict[Any, RayWorkerHandle] = {}  # what is asked of Ray: the result of build, then of run
        self._building: set[Any] = set()
        self._monitor = threading.Thread(target=self._watch, name="worker-monitor", daemon=True)
        if any(not worker.is_near for worker in workers):
            self._cause_seconds = _ACCOUNT_SECONDS

    @property
    def workers(self) -> Sequence[RayWorkerHandle]:
        return self._workers

    def launch(self) -> None:
        """Has every actor build its worker and then wait for requests. They are initialized."""
        for worker in self._workers:
            built = worker.actor.build.remote()
            self._building.add(built)
            self._watched[built] = worker
        self._monitor.start()

    def root_cause_of(self, error: Exception) -> Exception:
        found = super().root_cause_of(error)
        if found is error and isinstance(error, PeerDiedError):
            # Ray does not know of it yet: then what the queue knows has to do.
            for worker in self._workers:
                if worker.name == error.name:
                    worker.account = worker.account or str(error)
                    return worker.death_error()
        return found

    def terminate(self, *, gracefully: bool = False) -> None:
        if os.getpid() != self._pid:  # a fork of the engine's process: the actors are not its own
            return
        self.expect_exits()
        self.stop.set()
        with self._end_lock:
            if self._ended:
                return
            try:
                if gracefully and self.failure is None:
                    busy = any(
                        w.activity.seconds > _BUSY_GRACE_SECONDS and not w.activity.is_idle for w in self._workers
                    )
                    with self._changed:
                        self._changed.wait_for(
                            lambda: all(worker.has_ended for worker in self._workers),
                            _BUSY_GRACE_SECONDS if busy else _GRACE_SECONDS,
                        )
                self._wake.set()
                if self._monitor.ident:
                    self._monitor.join()
            finally:  # also when Ctrl-C interrupts the waits above
                self._job.kill()
                self._wait_gone(_KILL_SECONDS)
                for worker in self._workers:  # a stopped process does not hear of Ray's wish
                    worker.send_signal(signal.SIGKILL)
                self._wait_gone(_KILL_SECONDS)
                self._ended = True

    def is_monitor_thread(self) -> bool:
        return threading.current_thread() is self._monitor

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self.terminate()
        self._job.close()
        for worker in self._workers:
            worker.close()
        self._wake.close()
        self.stop.close()

    def _wait_gone(self, timeout: float) -> None:
        """Until the processes of near workers have ended; Ray answers for the others."""
        deadline = time.monotonic() + timeout
        open_sockets = {worker.control.fileno() for worker in self._workers if worker.control is not None}
        poll = select.poll()
        for fd in open_sockets:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        while open_sockets and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1e3):
                poll.unregister(fd)
                open_sockets.discard(fd)

    # --- the monitor's own thread

    def _watch(self) -> None:
        """Until told to end: handshakes as they come, deaths as they happen."""
        try:
            self._watch_until_told()
        except Exception as e:  # noqa: BLE001  (without a monitor no death would be noticed: that ends the engine)
            error = EngineDeadError(f"The workers cannot be watched any more: {type(e).__name__}: {e}")
            error.__cause__ = e
            self.fail(error)

    def _watch_until_told(self) -> None:
        poll = select.poll()
        poll.register(self._wake.fd, select.POLLIN)
        near = {worker.control.fileno(): worker for worker in self._workers if worker.control is not None}
        for fd in near:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        while not self._wake.is_set and self._watched:
            gone = [near[fd] for fd, _ in poll.poll(_POLL_SECONDS * 1e3) if fd in near]
            for worker in gone:
                assert worker.control is not None
                poll.unregister(worker.control)
            lost = self._ask_ray()
            if (gone or lost) and not self._ending and self.failure is None:
                self._reap_workers(lost, gone)

    def _ask_ray(self) -> list[RayWorkerHandle]:
        """Takes what has come back since the last look; returns the workers that turned out to be lost."""
        if not ray.is_initialized():  # to ask all the same would start another Ray
            raise RuntimeError("ray.shutdown() was called in the engine's process, which ends its actors")
        lost = []
        for ref in ready(list(self._watched)):
            worker = self._watched.pop(ref)
            is_built = ref in self._building
            try:
                handshake = msgspec.msgpack.decode(ray.get(ref), type=Handshake)
            except RayError as e:
                worker.account = summary_of(e)
            else:
                if handshake.failure is None and is_built:
                    self._run(worker)
                    continue
                if handshake.failure is not None and is_built:
                    self.fail(handshake.failure.to_exception())
                worker.account = handshake.failure.message if handshake.failure else "It has left its loop."
            with self._changed:
                worker.has_ended = True
                self._changed.notify_all()
            lost.append(worker)
        return lost

    def _run(self, worker: RayWorkerHandle) -> None:
        if not worker.is_near:
            self._activity_table.write_idle(worker.rank)
        self._watched[worker.actor.run.remote()] = worker
        with self._changed:
            worker.is_ready = True
            self._changed.notify_all()

    def _reap_workers(self, lost: list[RayWorkerHandle], gone: list[RayWorkerHandle]) -> None:
        """Waits for Ray's account of what the kernel has told, and for those that die of the same cause."""
        deadline = time.monotonic() + _ACCOUNT_SECONDS
        gather_until = time.monotonic() + self.GATHER_SECONDS
        while time.monotonic() < deadline and not self._wake.is_set:
            waiting = [worker for worker in gone if not worker.has_ended]
            if not waiting and time.monotonic() > gather_until:
                break
            time.sleep(0.02)
            lost += self._ask_ray()
        everyone = lost + [worker for worker in gone if worker not in lost]
        for worker in everyone:
            worker.has_ended = True
        if not self._ending:
            self.fail_of_deaths(everyone)
