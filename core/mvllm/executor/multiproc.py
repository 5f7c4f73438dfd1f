"""Workers in processes of their own, on this machine.

    engine core ── rpc_broadcast_mq ──> every worker          one message per call, written once, read by all
                <─ worker_response_mq ─ each worker           tagged with the request's id and the rank

A call is a message out and an entry in a table of calls under way. Replies find their entry by id; one that finds none
is late and is dropped. Nothing runs in the background: whoever waits for a result reads the replies, so a step costs
two messages and no thread switch. What does run beside is the monitor of the WorkerGroup, which watches for deaths.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from mvllm.config.engine_config import EngineConfig, ParallelConfig, replace_field
from mvllm.errors import EngineDeadError
from mvllm.executor.config_codec import encode_config
from mvllm.executor.handshake import WorkerStart
from mvllm.executor.interface import Executor
from mvllm.executor.message_queue import (
    MessageQueue,
    MessageReader,
    MessageWriter,
    PeerDiedError,
    QueueError,
    QueueSettings,
    QueueStoppedError,
    QueueTimeoutError,
    ReaderGroup,
    plan_rings,
    shared_memory_space,
)
from mvllm.executor.process_tools import unnamed_file
from mvllm.executor.rpc import FLUSH_ID, STOP_ID, MethodCodec, Reply, Request, codec_of
from mvllm.executor.status_board import StatusBoard
from mvllm.executor.worker_group import FailureCallback, Launch, WorkerGroup
from mvllm.executor.worker_handle import WorkerHandle
from mvllm.logging import get_logger
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.platform.tokens_on_device import keeps_tokens_on_device
from mvllm.platform.topology import LaunchTopology, WorkerContext

logger = get_logger(__name__)

T = TypeVar("T")

_HAS_PROC = os.path.isdir("/proc/self/fd")
_STEP = "execute_model"
_BROADCAST = QueueSettings()
_RESPONSE = QueueSettings(num_slots=10, slot_bytes=256 << 10)
_WARN_SECONDS = 30.0


class RpcFuture(Future[T], Generic[T]):
    """The result of a call. Waiting for it is what reads the replies, so wait from the executor's thread.

    Args:
        executor: Whose call it is.
        timeout: Seconds that `result` waits when it is not told otherwise. They count from the call of `result`.
    """

    def __init__(self, executor: MultiprocExecutor, timeout: float | None) -> None:
        super().__init__()
        self._executor = executor
        self._timeout = timeout
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        """The result.

        Raises:
            TimeoutError: It is not there in time; the message names the workers that have not answered.
            Exception: A worker's own, or the failure of a worker's process.
        """
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, or None."""
        self._wait(timeout)
        return super().exception(0)

    def done(self) -> bool:
        """Whether `result` would return at once."""
        if not super().done():
            self._executor.ask_for(self)
            self._executor.take_replies()
        return super().done()

    @property
    def is_settled(self) -> bool:
        """`done`, without looking for replies."""
        return super().done()

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            self._executor.wait_for(self, self._timeout, give_up=True)
        else:
            self._executor.wait_for(self, timeout, give_up=False)


class _Call:
    """A call under way: who has answered, who has not."""

    def __init__(self, request_id: int, codec: MethodCodec, ranks: Sequence[int], future: RpcFuture[Any]) -> None:
        self.id = request_id
        self.codec = codec
        self.missing = set(ranks)
        self.results: dict[int, Any] = {}
        self.future = future
        self.label = codec.name

    def take(self, reply: Reply) -> bool:
        """Keeps one rank's result; returns whether it was the last."""
        self.missing.discard(reply.rank)
        self.results[reply.rank] = self.codec.result.decode(reply.result)
        return not self.missing


class MultiprocExecutor(Executor):
    """One process per worker, started with the platform's environment for it.

    Raises:
        Exception: On construction: a worker's own exception, if one cannot be built. Nothing stays behind.
    """

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        super().__init__(config, platform)
        with enter_phase(Phase.ENGINE):
            topology = platform.topology(config.parallel)
        names = worker_names(config.parallel, topology.num_workers)
        self._ranks = tuple(range(len(names)))
        self._reply_rank = _reply_rank(config.parallel, len(names))
        self._next_id = STOP_ID + 1
        self._calls: dict[int, _Call] = {}
        self._answers_late = keeps_tokens_on_device(config, platform.capabilities)
        self._owed: Future[Any] | None = None  # of the step that workers will answer when something follows it
        self._board = StatusBoard.create(len(names))
        queues = _Queues(names)
        meeting = _meeting_place() if len(names) > 1 else None
        launches = _launches(config, platform, topology, names, queues, meeting, self._board)
        self._group = WorkerGroup(launches, self._board)
        self._writer, self._readers = queues.open(self._group)
        self._replies = ReaderGroup(self._readers, self._group.stop)
        # Also run when the executor is dropped without a word, and when the interpreter ends.
        self._finalizer = weakref.finalize(
            self, _shut_down, self._group, self._writer, self._readers, self._board, os.getpid()
        )
        try:
            try:
                self._group.launch()
            finally:  # the workers have inherited what is theirs
                queues.close()
                if meeting is not None:
                    meeting.close()
            self._group.wait_ready(config.parallel.start_timeout)
        except BaseException:
            self.shutdown()
            raise

    # --- calls

    def collective_rpc(  # type: ignore[override]
        self,
        method: str,
        args: tuple[Any, ...] = (),
        *,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        non_block: bool = False,
    ) -> list[Any] | Future[list[Any]]:
        limit = self._config.parallel.start_timeout if timeout is None else timeout
        future: RpcFuture[list[Any]] = RpcFuture(self, limit)
        called = self._ranks if ranks is None else tuple(sorted({rank for rank in ranks if rank in self._ranks}))
        if not called:
            future.set_result([])
        else:
            self._send(method, args, ranks=None if ranks is None else called, expect=called, future=future)
        return future if non_block else future.result()

    def execute_model(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: RpcFuture[ModelRunnerOutput] = RpcFuture(self, None)
        call = self._send(_STEP, (plan,), ranks=None, expect=(self._reply_rank,), future=future)
        self._owed = future if self._answers_late else None
        call.label = f"{_STEP} of step {plan.step}"
        return future

    def on_failure(self, callback: FailureCallback) -> None:
        """Has `callback` called, once, from another thread, when the workers can no longer be used."""
        self._group.on_failure(callback)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids in rank order."""
        return [worker.pid for worker in self._group.workers]

    def shutdown(self) -> None:
        if self._finalizer.alive:
            error = self._group.failure or EngineDeadError("The workers have been shut down.")
            self._finalizer()
            self._fail_calls(error)

    # --- waiting, for RpcFuture

    def wait_for(self, future: RpcFuture[Any], timeout: float | None, *, give_up: bool) -> None:
        """Reads replies until `future` is settled.

        Args:
            timeout: Seconds; None is for a step, which gets `step_timeout` and fails the executor when it is late.
            give_up: At the timeout, end the call: replies that come later are dropped. Else it can be waited for again.

        Raises:
            TimeoutError: It is not in time.
        """
        start = time.monotonic()
        warn_at = start + _WARN_SECONDS
        limit = self._config.parallel.step_timeout if timeout is None else timeout
        self.ask_for(future)
        while not future.is_settled:
            if not self._finalizer.alive:
                self._fail_calls(EngineDeadError("The workers have been shut down."))
                return
            now = time.monotonic()
            try:
                ready = self._replies.wait(max(0.0, min(start + limit, warn_at) - now))
            except QueueTimeoutError:
                if time.monotonic() < start + limit:
                    self._warn(future, time.monotonic() - start)
                    warn_at += _WARN_SECONDS
                elif timeout is None:
                    self._fail_stuck()
                else:
                    raise self._timeout(future, limit, give_up) from None
            except (PeerDiedError, QueueStoppedError) as e:
                self._fail_calls(self._group.settle(e))
            else:
                self._dispatch(ready)

    def take_replies(self) -> None:
        """Settles whatever can be settled without waiting."""
        if not self._finalizer.alive:
            return
        with contextlib.suppress(QueueTimeoutError):
            try:
                self._dispatch(self._replies.wait(0.0))
            except (PeerDiedError, QueueStoppedError) as e:
                self._fail_calls(self._group.settle(e))

    def ask_for(self, future: RpcFuture[Any]) -> None:
        """Has the workers answer a step that they would answer only when another follows."""
        if self._owed is future and not future.is_settled and self._finalizer.alive:
            self._owed = None
            with contextlib.suppress(QueueError):  # which the wait for the reply meets, too, and reports
                self._writer.enqueue(Request(FLUSH_ID, "", b""), timeout=self._config.parallel.step_timeout)

    # --- inside

    def _send(
        self, method: str, args: tuple[Any, ...], *, ranks: tuple[int, ...] | None, expect: Sequence[int], future: Any
    ) -> _Call:
        codec = codec_of(method)
        self._group.check()
        if not self._finalizer.alive:
            raise EngineDeadError(f"{method} was called after the workers had been shut down.")
        parallel = self._config.parallel
        reply_from, limit = (
            (self._reply_rank, parallel.step_timeout) if method == _STEP else (None, parallel.start_timeout)
        )
        request = Request(self._next_id, method, msgspec.msgpack.encode(args), ranks, reply_from)
        self._next_id += 1
        try:
            self._writer.enqueue(request, timeout=limit)
        except (PeerDiedError, QueueStoppedError) as e:
            raise self._group.settle(e) from None
        except QueueTimeoutError as e:
            late = self._busy() or self._group.workers
            raise self._group.settle(self._group.stuck(late, limit, "took no request")) from e
        call = self._calls[request.id] = _Call(request.id, codec, expect, future)
        return call

    def _dispatch(self, readers: Sequence[MessageReader[Reply]]) -> None:
        for reader in readers:
            reply, _ = reader.dequeue()
            call = self._calls.get(reply.id)
            if reply.failure is not None:
                self._take_failure(reply.failure.to_exception(), call, is_step=reply.failure.activity.startswith(_STEP))
            elif call is None:
                logger.debug("Dropped a late reply of rank %d to request %d", reply.rank, reply.id)
            elif call.take(reply):
                del self._calls[call.id]
                results = [call.results[rank] for rank in sorted(call.results)]
                call.future.set_result(results[0] if call.codec.name == _STEP else results)

    def _take_failure(self, error: Exception, call: _Call | None, *, is_step: bool) -> None:
        if is_step:
            # The rows of this rank are not what the others think any more; nothing after this could be right. If
            # another rank's death is behind it, that is the better story.
            self._fail_calls(self._group.settle(error))
        elif call is not None:
            del self._calls[call.id]
            call.future.set_exception(self._group.cause_of(error))

    def _fail_calls(self, error: Exception) -> None:
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.future.set_exception(error)

    def _fail_stuck(self) -> None:
        late = self._busy() or [self._group.workers[self._reply_rank]]
        # Those that wait for a stuck rank are as late as it is; the one that came to this step last is named first.
        late.sort(key=lambda worker: (-(worker.activity.step or 0), worker.activity.seconds))
        seconds = self._config.parallel.step_timeout
        self._fail_calls(self._group.settle(self._group.stuck(late, seconds, "has not finished its step")))

    def _busy(self) -> list[WorkerHandle]:
        return [worker for worker in self._group.workers if not worker.activity.is_idle]

    def _timeout(self, future: RpcFuture[Any], seconds: float, give_up: bool) -> TimeoutError:
        call = next(call for call in self._calls.values() if call.future is future)
        if give_up:
            del self._calls[call.id]
        waiting = [self._group.workers[rank] for rank in sorted(call.missing)]
        states = "; ".join(f"{worker}, which is in {worker.activity}" for worker in waiting)
        return TimeoutError(f"{call.label}: no answer within {seconds:g} s from {states}.")

    def _warn(self, future: RpcFuture[Any], seconds: float) -> None:
        label = next((call.label for call in self._calls.values() if call.future is future), "a call")
        states = ", ".join(f"{worker} in {worker.activity}" for worker in self._busy())
        logger.warning("%s has not ended after %.0f s: %s", label, seconds, states or "all workers are idle")


def worker_names(parallel: ParallelConfig, num_workers: int) -> list[str]:
    """What workers are called, in rank order: `Worker_TP0`, `Worker_PP1_TP0`, or just `Worker` where there is one."""
    tp = parallel.tensor_parallel_size
    if num_workers != parallel.world_size:  # some drive several devices: ranks are not workers
        return [f"Worker_{rank}" for rank in range(num_workers)]
    if num_workers == 1:
        return ["Worker"]
    stage = ["" if parallel.pipeline_parallel_size == 1 else f"_PP{rank // tp}" for rank in range(num_workers)]
    part = ["" if tp == 1 else f"_TP{rank % tp}" for rank in range(num_workers)]
    return [f"Worker{a}{b}" for a, b in zip(stage, part)]


def _reply_rank(parallel: ParallelConfig, num_workers: int) -> int:
    """Who answers a step: the first rank of the last pipeline stage."""
    return num_workers - parallel.tensor_parallel_size if num_workers == parallel.world_size else 0


class _Queues:
    """rpc_broadcast_mq and every worker_response_mq, planned together so that they fit the shared memory there is."""

    def __init__(self, names: Sequence[str]) -> None:
        num = len(names)
        wanted = [_BROADCAST.shape(num), *(_RESPONSE.shape(1) for _ in names)]
        shapes = plan_rings(wanted, shared_memory_space())
        settings = [
            msgspec.structs.replace(base, num_slots=shape.num_slots, slot_bytes=shape.slot_bytes)
            for base, shape in zip([_BROADCAST, *[_RESPONSE] * num], shapes)
        ]
        self.broadcast = MessageQueue.create("rpc_broadcast_mq", names, writer="EngineCore", settings=settings[0])
        self.responses = [
            MessageQueue.create(f"worker_response_mq of {name}", ["EngineCore"], writer=name, settings=setting)
            for name, setting in zip(names, settings[1:])
        ]

    def open(self, group: WorkerGroup) -> tuple[MessageWriter, list[MessageReader[Reply]]]:
        """The executor's ends."""
        writer = self.broadcast.open_writer(group.stop)
        return writer, [queue.open_reader(0, Reply, group.stop) for queue in self.responses]

    def close(self) -> None:
        """Gives up what the workers have inherited."""
        for queue in (self.broadcast, *self.responses):
            queue.close()


def _launches(
    config: EngineConfig,
    platform: Platform,
    topology: LaunchTopology,
    names: Sequence[str],
    queues: _Queues,
    meeting: _MeetingPlace | None,
    board: StatusBoard,
) -> list[Launch]:
    encoded = encode_config(config)
    quiet = encode_config(replace_field(config, "load.use_tqdm", False))
    launches = []
    for rank, name in enumerate(names):
        requests, replies = queues.broadcast.reader_handle(rank), queues.responses[rank].writer_handle()
        stack_fd = unnamed_file("stacks")
        start = WorkerStart(
            name=name,
            context=WorkerContext(
                rank=rank,
                local_rank=rank,
                world_size=len(names),
                local_world_size=len(names),
                seed=config.model.seed,
                in_engine_process=False,
                init_method=meeting.address if meeting else None,
            ),
            platform=platform.spec.name,
            config=quiet if rank else encoded,  # one progress bar
            requests=requests,
            replies=replies,
            board_fd=board.fd,
            stack_fd=stack_fd,
            sys_path=[path or os.getcwd() for path in sys.path],
            python_path=os.environ.get("PYTHONPATH"),
            log_level=_log_level(),
        )
        env = topology.env_per_worker[rank] if topology.env_per_worker else {}
        shared = (board.fd, *(meeting.fds if meeting else ()))
        launches.append(Launch(start, env, (*requests.fds, *replies.fds, stack_fd, *shared)))
    return launches


@dataclass(frozen=True)
class _MeetingPlace:
    """Where the ranks find each other: an address for `init_method`, and descriptors that must be inherited for it."""

    address: str
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """The workers have inherited it."""
        for fd in self.fds:
            os.close(fd)


def _meeting_place() -> _MeetingPlace:
    """An unnamed file on Linux: no port that somebody may take first, nothing that listens, nothing left behind."""
    if _HAS_PROC:
        fd = unnamed_file("rendezvous")
        return _MeetingPlace(f"file:///proc/self/fd/{fd}", (fd,))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return _MeetingPlace(f"tcp://127.0.0.1:{probe.getsockname()[1]}")


def _log_level() -> str:
    return logging.getLevelName(logging.getLogger("mvllm").getEffectiveLevel())


def _shut_down(
    group: WorkerGroup,
    writer: MessageWriter,
    readers: Sequence[MessageReader[Reply]],
    board: StatusBoard,
    pid: int,
) -> None:
    """The ladder: a message, then whatever WorkerGroup.end does, then the queues."""
    if os.getpid() != pid:  # a fork of the engine's process: nothing of this is its own
        return
    told = False
    if group.failure is None and group.workers and all(worker.is_ready for worker in group.workers):
        group.expect_ends()
        with contextlib.suppress(QueueError):
            writer.enqueue(Request(STOP_ID, "", b""), timeout=0.5)
            told = True
    group.end(gracefully=told)
    writer.close()
    for reader in readers:
        reader.close()
    group.close()
    board.close()
