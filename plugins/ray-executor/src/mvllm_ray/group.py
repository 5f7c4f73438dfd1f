"""The WorkerGroup of Ray actors: one monitor thread watches them, and they are terminated together.

The thread polls the sockets of local actors, which the kernel closes at their death, and a few times a second asks Ray,
without blocking, whether an actor's `run` has returned. A lost actor or node is reported like a dead worker process.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from mvllm.extension_api import (
    EngineDeadError,
)
from mvllm.extension_api.remote_executors import (
    ActivityTable,
    Handshake,
    PeerDiedError,
    StackFile,
    StopSignal,
    WorkerGroup,
    WorkerHandle,
    is_stopped,
    open_pidfd,
)
from mvllm_ray.cluster import RayJob, ready, summary_of
from mvllm_ray.worker import RayWorkerIdentity, RayWorkerReport

_POLL_SECONDS = 0.25  # interval of asking Ray
_RAY_REPORT_SECONDS = 2.0  # how long after a closed connection Ray may report the death
_KILL_SECONDS = 1.5  # after ray.kill, and after SIGKILL
_REPORT_SECONDS = 2.0  # for an actor on another node to report its activity


class RayWorkerHandle(WorkerHandle):
    """The executor's handle of one actor.

    Args:
        name, rank: As in WorkerHandle.
        identity: What the actor reported about itself; its process id is the one on its node.
        actor: Ray's handle.
        stack_fd: The file for the stacks of a worker on the engine's node; -1 for one on another node.
        activity_table: As in WorkerHandle.

    Attributes:
        node_id, node_ip: Ray's name and address of its node.
        is_local: Whether it is on the engine's node and uses shared memory.
        has_ended: Whether its loop has returned or its process is gone.
        stack_fd: As given.
        exit_reason: What is known about its end.
        actor: As given.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        identity: RayWorkerIdentity,
        actor: Any,
        stack_fd: int,
        activity_table: ActivityTable,
    ) -> None:
        super().__init__(name, rank, identity.pid, activity_table, stack_fd)
        self.node_id = identity.node_id
        self.node_ip = identity.node_ip
        self.is_local = stack_fd >= 0
        self.has_ended = False
        self.stack_fd = stack_fd
        self.exit_reason = ""
        self.actor = actor

    def set_control(self, control: socket.socket, pid: int | None) -> None:
        """Sets the connection of a local worker; `pid` is its process id as the kernel reports it, if it does."""
        self.control = control
        if pid is not None:
            self.pidfd = open_pidfd(pid)

    def __str__(self) -> str:
        return f"{self.name} (rank {self.rank}, pid {self.pid} on node {self.node_ip})"

    @property
    def is_running(self) -> bool:
        return not self.has_ended

    @property
    def is_stopped(self) -> bool:
        return self.pidfd >= 0 and is_stopped(self.pid)

    def dump_stack(self) -> str:
        """A local worker writes its stacks on a signal, even inside native code; others are asked by an actor call."""
        if self.pidfd >= 0:
            return self.stacks.read_after(lambda: self.send_signal(StackFile.SIGNAL))
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

    def describe_exit(self) -> str:
        message = f"{self} was lost {self.activity.during()}. {self.exit_reason or 'Its process has ended.'}"
        if stack := self.stacks.text():
            message += f"\nIts stack:\n{stack.rstrip()}"
        return message

    def send_signal(self, number: signal.Signals) -> None:
        """Has no effect when the process has ended, or is on another node."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self.pidfd, number)


class RayWorkerGroup(WorkerGroup[RayWorkerHandle]):
    """The actors of one engine: watched by one thread, ended together.

    Args:
        job: The actors and their placement group, which the group ends and releases.
        workers: In rank order.
        activity_table: Where local workers write their activity, and the executor the requests it sent to the others.
    """

    def __init__(self, job: RayJob, workers: Sequence[RayWorkerHandle], activity_table: ActivityTable) -> None:
        super().__init__(workers)
        self._job = job
        self._activity_table = activity_table
        self._monitor_stop = StopSignal()
        self._watched: dict[Any, RayWorkerHandle] = {}  # pending actor calls: `build`, then `run`
        self._building: set[Any] = set()
        if any(not worker.is_local for worker in workers):
            self._death_report_seconds = _RAY_REPORT_SECONDS

    def launch(self) -> None:
        """Has every actor, which is initialized, build its worker and then serve requests."""
        for worker in self._workers:
            built = worker.actor.build.remote()
            self._building.add(built)
            self._watched[built] = worker
        self._is_launched = True
        self._monitor.start()

    def root_cause_of(self, error: Exception) -> Exception:
        found = super().root_cause_of(error)
        if found is error and isinstance(error, PeerDiedError):
            # Ray has not reported the death yet: the queue's error is all that is known.
            for worker in self._workers:
                if worker.name == error.name:
                    worker.exit_reason = worker.exit_reason or str(error)
                    return worker.death_error()
        return found

    def _request_exit(self) -> None:
        self._monitor_stop.set()
        if self._monitor.ident:
            self._monitor.join()

    def _kill(self) -> None:
        self._job.kill()
        self._wait_gone(_KILL_SECONDS)
        for worker in self._workers:  # a stopped process does not react to ray.kill
            worker.send_signal(signal.SIGKILL)
        self._wait_gone(_KILL_SECONDS)
        for worker in self._workers:
            worker.has_ended = True

    def _release(self) -> None:
        self._job.close()
        self._monitor_stop.close()

    def _wait_gone(self, timeout: float) -> None:
        """Waits until the processes of local workers have ended; Ray ends the others."""
        deadline = time.monotonic() + timeout
        open_sockets = {worker.control.fileno() for worker in self._workers if worker.control is not None}
        poll = select.poll()
        for fd in open_sockets:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        while open_sockets and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1e3):
                poll.unregister(fd)
                open_sockets.discard(fd)

    # --- in the monitor thread

    def _run_monitor(self) -> None:
        """Records handshakes and ends of workers until `terminate` sets the stop signal."""
        try:
            self._watch_workers()
        except Exception as e:  # noqa: BLE001  (without a monitor no death is noticed, so the engine fails)
            error = EngineDeadError(f"The workers cannot be watched any more: {type(e).__name__}: {e}")
            error.__cause__ = e
            self.fail(error)

    def _watch_workers(self) -> None:
        poll = select.poll()
        poll.register(self._monitor_stop.fd, select.POLLIN)
        by_fd = {worker.control.fileno(): worker for worker in self._workers if worker.control is not None}
        for fd in by_fd:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        while not self._monitor_stop.is_set and self._watched:
            gone = [by_fd[fd] for fd, _ in poll.poll(_POLL_SECONDS * 1e3) if fd in by_fd]
            for worker in gone:
                assert worker.control is not None
                poll.unregister(worker.control)
            lost = self._poll_ray()
            if (gone or lost) and not self._is_shutting_down and self.failure is None:
                self._reap_workers(lost, gone)

    def _poll_ray(self) -> list[RayWorkerHandle]:
        """Handles the actor calls that have returned since the last time; returns the workers that have ended."""
        if not ray.is_initialized():  # asking would start another Ray
            raise RuntimeError("ray.shutdown() was called in the engine's process, which ends its actors")
        lost = []
        for ref in ready(list(self._watched)):
            worker = self._watched.pop(ref)
            is_built = ref in self._building
            try:
                handshake = msgspec.msgpack.decode(ray.get(ref), type=Handshake)
            except RayError as e:
                worker.exit_reason = summary_of(e)
            else:
                if handshake.failure is None and is_built:
                    self._run(worker)
                    continue
                if handshake.failure is not None and is_built:
                    self.fail(handshake.failure.to_exception())
                worker.exit_reason = (
                    handshake.failure.message if handshake.failure else "Its request loop has returned."
                )
            with self._state_changed:
                worker.has_ended = True
                self._state_changed.notify_all()
            lost.append(worker)
        return lost

    def _run(self, worker: RayWorkerHandle) -> None:
        if not worker.is_local:
            self._activity_table.write_idle(worker.rank)
        self._watched[worker.actor.run.remote()] = worker
        with self._state_changed:
            worker.is_ready = True
            self._state_changed.notify_all()

    def _reap_workers(self, lost: list[RayWorkerHandle], gone: list[RayWorkerHandle]) -> None:
        """Waits for Ray's report of the deaths of `gone` and for deaths of the same cause, then fails the group."""
        deadline = time.monotonic() + _RAY_REPORT_SECONDS
        gather_until = time.monotonic() + self.GATHER_SECONDS
        while time.monotonic() < deadline and not self._monitor_stop.is_set:
            waiting = [worker for worker in gone if not worker.has_ended]
            if not waiting and time.monotonic() > gather_until:
                break
            time.sleep(0.02)
            lost += self._poll_ray()
        ended = lost + [worker for worker in gone if worker not in lost]
        for worker in ended:
            worker.has_ended = True
        if not self._is_shutting_down:
            self.fail_of_deaths(ended)
