"""Calls to workers in other processes, on this machine or on others.

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
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.errors import EngineDeadError, WorkerError
from mvllm.executor.interface import Executor
from mvllm.executor.message_queue import (
    MessageReader,
    MessageWriter,
    PeerDiedError,
    QueueCorruptError,
    QueueError,
    QueueStoppedError,
    QueueTimeoutError,
    ReaderGroup,
)
from mvllm.executor.process.activity_table import ActivityTable
from mvllm.executor.rpc_call import RpcCall, RpcFuture
from mvllm.executor.rpc_messages import FLUSH_ID, STOP_ID, Reply, Request, codec_of
from mvllm.executor.rpc_queues import response_queue_name
from mvllm.executor.worker_group import FailureCallback, WorkerGroup
from mvllm.executor.worker_handle import WorkerHandle
from mvllm.executor.worker_topology import devices_per_worker, with_workers_as_ranks
from mvllm.logging import get_logger
from mvllm.messages.scheduler_output import ModelRunnerOutput, SchedulerOutput
from mvllm.platform.interface import Platform
from mvllm.platform.tokens_on_device import keeps_sampled_tokens_on_device

logger = get_logger(__name__)

STEP_METHOD = "execute_model"
SAMPLE_METHOD = "sample_tokens"
"""Has no reply of its own: the step has one."""
_WARN_SECONDS = 30.0
_SHUT_DOWN = "The workers have been shut down."


class RpcExecutor(Executor):
    """An executor whose workers are reached through message queues.

    A subclass starts the workers; it calls `_use` as soon as there is something that has to be ended.

    Args:
        config, platform: As Executor.
        num_workers: How many there will be.
    """

    def __init__(self, config: EngineConfig, platform: Platform, num_workers: int) -> None:
        super().__init__(config, platform)
        self._ranks = tuple(range(num_workers))
        self._reply_rank = _reply_rank(config.parallel, num_workers)
        self._next_id = STOP_ID + 1
        self._calls: dict[int, RpcCall] = {}
        self._senders: dict[str, int] = {}  # by the name of their queue
        self._defers_replies = keeps_sampled_tokens_on_device(config, platform.capabilities)
        self._deferred_step: Future[Any] | None = None  # of the step that workers will answer when something follows it

    def _attach_workers(
        self,
        group: WorkerGroup[Any],
        writer: MessageWriter,
        readers: Sequence[MessageReader[Reply]],
        board: ActivityTable,
    ) -> None:
        """Takes over the workers and the executor's ends of the queues; from now on `shutdown` ends them.

        Also when the executor is dropped without a word, and when the interpreter ends.
        """
        self._group = group
        self._writer = writer
        self._replies = ReaderGroup(readers, group.stop, self._config.parallel.mq_spin_seconds)
        self._finalizer = weakref.finalize(self, _shut_down, group, writer, readers, board, os.getpid())

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
        call = self._send(STEP_METHOD, (plan,), ranks=None, expect=(self._reply_rank,), future=future)
        call.label = f"{STEP_METHOD} of step {plan.step}"
        self._deferred_step = future if self._defers_replies else None
        return future

    def can_sample_later(self) -> bool:
        found: list[bool] = self.collective_rpc("can_sample_later")  # type: ignore[assignment]
        return all(found)

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> None:
        self._group.check()
        payload = msgspec.msgpack.encode((step, mask_rows, token_masks))
        self._enqueue(Request(self._next_id, SAMPLE_METHOD, payload), self._config.parallel.step_timeout)
        self._next_id += 1

    def on_failure(self, callback: FailureCallback) -> None:
        """Has `callback` called, once, from another thread, when the workers can no longer be used."""
        self._group.on_failure(callback)

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        """In rank order."""
        return self._group.workers

    @property
    def worker_pids(self) -> list[int]:
        """Process ids in rank order."""
        return [worker.pid for worker in self._group.workers]

    def shutdown(self) -> None:
        if self._finalizer.alive:
            error = self._group.failure or EngineDeadError(_SHUT_DOWN)
            self._finalizer()
            self._fail_calls(error)
        else:  # perhaps in another thread, and not done yet
            self._group.terminate()

    # --- waiting, for RpcFuture

    def wait_for(self, future: RpcFuture[Any], timeout: float | None, *, cancel_on_timeout: bool) -> None:
        """Reads replies until `future` is settled.

        Args:
            timeout: Seconds; None is for a step, which gets `step_timeout` and fails the executor when it is late.
            cancel_on_timeout: At the timeout, set a TimeoutError as the call's result and drop later replies.
                Otherwise the call can be waited for again.

        Raises:
            TimeoutError: It is not in time, and the call has not been given up.
        """
        start = time.monotonic()
        warn_at = start + _WARN_SECONDS
        stacks = True  # once per wait: what hangs for long goes on hanging in the same place
        limit = self._config.parallel.step_timeout if timeout is None else timeout
        self.request_deferred_reply(future)
        while not future.is_resolved:
            if not self._finalizer.alive:
                self._fail_calls(EngineDeadError(_SHUT_DOWN))
                return
            now = time.monotonic()
            try:
                ready = self._replies.wait(max(0.0, min(start + limit, warn_at) - now))
            except QueueTimeoutError:
                if time.monotonic() < start + limit:
                    self._warn(future, time.monotonic() - start, stacks=stacks)
                    warn_at, stacks = warn_at + _WARN_SECONDS, False
                elif timeout is None:
                    self._fail_stuck()
                elif cancel_on_timeout:
                    self._cancel_call(future, limit)
                else:
                    raise self._timeout(self._call_of(future), limit) from None
            except (PeerDiedError, QueueStoppedError) as e:
                self._fail_calls(self._root_cause(e))
            else:
                self._dispatch(ready)

    def poll_replies(self) -> None:
        """Settles whatever can be settled without waiting."""
        if not self._finalizer.alive:
            return
        with contextlib.suppress(QueueTimeoutError):
            try:
                self._dispatch(self._replies.wait(0.0))
            except (PeerDiedError, QueueStoppedError) as e:
                self._fail_calls(self._root_cause(e))

    def request_deferred_reply(self, future: RpcFuture[Any]) -> None:
        """Has the workers answer a step that they would answer only when another follows."""
        if self._deferred_step is future and not future.is_resolved and self._finalizer.alive:
            self._deferred_step = None
            with contextlib.suppress(QueueError):  # which the wait for the reply meets, too, and reports
                self._writer.enqueue(Request(FLUSH_ID, "", b""), timeout=self._config.parallel.step_timeout)

    # --- inside

    def _send(
        self, method: str, args: tuple[Any, ...], *, ranks: tuple[int, ...] | None, expect: Sequence[int], future: Any
    ) -> RpcCall:
        codec = codec_of(method)
        self._group.check()
        if not self._finalizer.alive:
            raise EngineDeadError(f"{method} was called after the workers had been shut down.")
        parallel = self._config.parallel
        reply_from, limit = (
            (self._reply_rank, parallel.step_timeout) if method == STEP_METHOD else (None, parallel.start_timeout)
        )
        request = Request(self._next_id, method, msgspec.msgpack.encode(args), ranks, reply_from)
        self._next_id += 1
        self._enqueue(request, limit)
        call = self._calls[request.id] = RpcCall(request.id, codec, expect, future)
        self._on_request_sent(request, args)
        return call

    def _enqueue(self, request: Request, limit: float) -> None:
        try:
            self._writer.enqueue(request, timeout=limit)
        except (PeerDiedError, QueueStoppedError) as e:
            raise self._root_cause(e) from None
        except QueueTimeoutError as e:
            busy = self._busy()
            late = [
                *busy,
                *(worker for worker in self._group.stopped_workers() if worker not in busy),
            ] or self._group.workers
            raise self._group.fail_with_root_cause(self._group.stuck_error(late, limit, "took no request")) from e

    def _on_request_sent(self, request: Request, args: tuple[Any, ...]) -> None:
        """A request is on its way; for subclasses that keep account of workers which cannot write on the board."""

    def _on_reply(self, reply: Reply, method: str | None) -> None:
        """A reply has come; likewise."""

    def _dispatch(self, readers: Sequence[MessageReader[Reply]]) -> None:
        for reader in readers:
            try:
                reply, _ = reader.dequeue()
            except (QueueCorruptError, msgspec.DecodeError) as e:
                sender = self._group.workers[self._sender_of(reader)]
                self._fail_calls(self._group.fail_with_root_cause(_unreadable(sender, f"what is no reply: {e}", e)))
                return
            if reply.rank != self._sender_of(reader):
                sender = self._group.workers[self._sender_of(reader)]
                error = _unreadable(sender, f"a reply in the name of rank {reply.rank}")
                self._fail_calls(self._group.fail_with_root_cause(error))
                return
            call = self._calls.get(reply.id)
            self._on_reply(reply, call.codec.name if call is not None else None)
            if reply.failure is not None:
                self._handle_failure(
                    reply.failure.to_exception(), call, is_step=reply.failure.activity.startswith(STEP_METHOD)
                )
            elif call is None:
                logger.debug("Dropped a late reply of rank %d to request %d", reply.rank, reply.id)
            elif self._is_complete(call, reply):
                del self._calls[call.id]
                results = [call.results[rank] for rank in sorted(call.results)]
                call.future.set_result(results[0] if call.codec.name == STEP_METHOD else results)

    def _sender_of(self, reader: MessageReader[Reply]) -> int:
        """The rank that writes what `reader` reads."""
        rank = self._senders.get(reader.name)
        if rank is None:
            rank = next(w.rank for w in self._group.workers if response_queue_name(w.name) == reader.name)
            self._senders[reader.name] = rank
        return rank

    def _is_complete(self, call: RpcCall, reply: Reply) -> bool:
        try:
            return call.add_reply(reply)
        except msgspec.DecodeError as e:
            sender = self._group.workers[reply.rank]
            error = _unreadable(sender, f"something else than {call.label} returns: {e}", e)
            self._handle_failure(error, call, is_step=call.codec.name == STEP_METHOD)
            return False

    def _handle_failure(self, error: Exception, call: RpcCall | None, *, is_step: bool) -> None:
        if is_step:
            # The rows of this rank are not what the others think any more; nothing after this could be right. If
            # another rank's death is behind it, that is the better story.
            self._fail_calls(self._group.fail_with_root_cause(error))
        elif call is not None:
            del self._calls[call.id]
            call.future.set_exception(self._group.root_cause_of(error))

    def _fail_calls(self, error: Exception) -> None:
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.future.set_exception(error)

    def _fail_stuck(self) -> None:
        oldest = min((call.id for call in self._calls.values() if call.codec.name == STEP_METHOD), default=0)
        absent = [worker for worker in self._group.workers if worker.activity.request_id < oldest]
        late = [*absent, *(worker for worker in self._busy() if worker not in absent)]
        late = late or [self._group.workers[self._reply_rank]]
        # Those that wait for a stuck rank are as late as it is. One that has not come to this step is named first, then
        # the one that came last.
        late.sort(key=lambda worker: (worker not in absent, -(worker.activity.step or 0), worker.activity.seconds))
        seconds = self._config.parallel.step_timeout
        self._fail_calls(
            self._group.fail_with_root_cause(self._group.stuck_error(late, seconds, "has not finished its step"))
        )

    def _busy(self) -> list[WorkerHandle]:
        return [worker for worker in self._group.workers if not worker.activity.is_idle]

    def _root_cause(self, error: PeerDiedError | QueueStoppedError) -> Exception:
        """Why a wait for the workers has ended: their failure, or somebody's wish."""
        found = self._group.fail_with_root_cause(error)
        return EngineDeadError(_SHUT_DOWN) if isinstance(found, QueueStoppedError) else found

    def _call_of(self, future: RpcFuture[Any]) -> RpcCall:
        return next(call for call in self._calls.values() if call.future is future)

    def _cancel_call(self, future: RpcFuture[Any], seconds: float) -> None:
        call = self._call_of(future)
        del self._calls[call.id]
        future.set_exception(self._timeout(call, seconds))

    def _timeout(self, call: RpcCall, seconds: float) -> TimeoutError:
        waiting = [self._group.workers[rank] for rank in sorted(call.missing)]
        states = "; ".join(f"{worker}, which is in {worker.activity}" for worker in waiting)
        return TimeoutError(f"{call.label}: no answer within {seconds:g} s from {states}.")

    def _warn(self, future: RpcFuture[Any], seconds: float, *, stacks: bool) -> None:
        call = next((call for call in self._calls.values() if call.future is future), None)
        busy = self._busy()
        states = ", ".join(f"{worker} in {worker.activity}" for worker in busy) or "all workers are idle"
        logger.warning("%s has not ended after %.0f s: %s", call.label if call else "a call", seconds, states)
        # A step that takes so long most likely hangs; loading weights may well do, and then stacks are for the curious.
        level = logging.WARNING if call is not None and call.codec.name == STEP_METHOD else logging.DEBUG
        if stacks and logger.isEnabledFor(level):
            for worker in busy:
                if stack := worker.dump_stack():
                    logger.log(level, "The stack of %s:\n%s", worker, stack.rstrip())


def _unreadable(worker: WorkerHandle, what: str, error: Exception | None = None) -> WorkerError:
    activity = str(worker.activity)
    unreadable = WorkerError(f"{worker} sent {what}", rank=worker.rank, pid=worker.pid, activity=activity)
    unreadable.__cause__ = error
    return unreadable


def worker_names(parallel: ParallelConfig, num_workers: int) -> list[str]:
    """What workers are called, in rank order: `Worker_TP0`, `Worker_PP1_TP0`, or just `Worker` where there is one."""
    if num_workers == 1:
        return ["Worker"]
    parallel = with_workers_as_ranks(parallel, devices_per_worker(parallel, num_workers))
    tp = parallel.tensor_parallel_size
    if num_workers != parallel.world_size:  # what they drive is their own class's affair
        return [f"Worker_{rank}" for rank in range(num_workers)]
    stage = ["" if parallel.pipeline_parallel_size == 1 else f"_PP{rank // tp}" for rank in range(num_workers)]
    part = ["" if tp == 1 else f"_TP{rank % tp}" for rank in range(num_workers)]
    return [f"Worker{a}{b}" for a, b in zip(stage, part)]


def _reply_rank(parallel: ParallelConfig, num_workers: int) -> int:
    """Who answers a step: the first rank of the last pipeline stage."""
    parallel = with_workers_as_ranks(parallel, devices_per_worker(parallel, num_workers))
    return num_workers - parallel.tensor_parallel_size if num_workers == parallel.world_size else 0


def _shut_down(
    group: WorkerGroup[Any],
    writer: MessageWriter,
    readers: Sequence[MessageReader[Reply]],
    board: ActivityTable,
    pid: int,
) -> None:
    """The ladder: a message, then whatever WorkerGroup.end does, then the queues."""
    if os.getpid() != pid:  # a fork of the engine's process: nothing of this is its own
        return
    if group.is_monitor_thread():  # by the garbage collector, which comes in any thread; this one has to see the ends
        args = (group, writer, readers, board, pid)
        threading.Thread(target=_shut_down, args=args, name="worker-shutdown", daemon=True).start()
        return
    told = False
    try:
        if group.failure is None and group.workers and all(worker.is_ready for worker in group.workers):
            group.expect_exits()
            with contextlib.suppress(QueueError):
                writer.enqueue(Request(STOP_ID, "", b""), timeout=0.5)
                told = True
        group.terminate(gracefully=told)
    finally:  # also when Ctrl-C interrupts what is above
        group.terminate()
        writer.close()
        for reader in readers:
            reader.close()
        group.close()
        board.close()
