"""Base of executors whose workers run in other processes, on this machine or on others.

    engine core ── rpc_broadcast_mq ──> every worker          one message per call, written once, read by all
                <─ worker_response_mq ─ each worker           tagged with the request's id and the rank

A call sends one message and adds an entry to the table of pending calls. Replies find their entry by id; a reply
without an entry is late and is dropped. The thread that waits for a result reads the replies, so a step costs two
messages and no thread switch. The only background thread is the monitor of the WorkerGroup, which watches for deaths.
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
from mvllm.executor.rpc_messages import FLUSH_ID, STOP_ID, Reply, RPCRequest, codec_of, remove_equal_masks
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
"""Has no reply: the reply of the step is sent after sampling."""
_WARN_SECONDS = 30.0
_SHUT_DOWN = "The workers have been shut down."


class RpcExecutor(Executor):
    """Calls workers through message queues.

    A subclass starts the workers. It calls `_attach_workers` as soon as there are processes to terminate.

    Args:
        config, platform: As in Executor.
        num_workers: The number of workers that the subclass starts.
    """

    def __init__(self, config: EngineConfig, platform: Platform, num_workers: int) -> None:
        super().__init__(config, platform)
        self._ranks = tuple(range(num_workers))
        self._reply_rank = _reply_rank(config.parallel, num_workers)
        self._next_id = STOP_ID + 1
        self._calls: dict[int, RpcCall] = {}
        self._senders: dict[str, int] = {}  # by the name of their queue
        self._defers_replies = keeps_sampled_tokens_on_device(config, platform.capabilities)
        self._deferred_step: Future[Any] | None = None  # of the step whose reply the workers defer

    def _attach_workers(
        self,
        group: WorkerGroup[Any],
        writer: MessageWriter,
        readers: Sequence[MessageReader[Reply]],
        activity_table: ActivityTable,
    ) -> None:
        """Takes over the workers and the executor's ends of the queues.

        From now on `shutdown`, garbage collection of the executor, and the end of the interpreter terminate them.
        """
        self._group = group
        self._writer = writer
        self._replies = ReaderGroup(readers, group.stop, self._config.parallel.mq_spin_seconds)
        self._finalizer = weakref.finalize(self, _shut_down, group, writer, readers, activity_table, os.getpid())

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
        indices = None
        if plan.mask_rows and (fewer := remove_equal_masks(len(plan.mask_rows), plan.token_masks)) is not None:
            masks, indices = fewer
            plan = msgspec.structs.replace(plan, token_masks=masks)
        # With copies to or from host blocks, the step has ended when every rank has copied its part.
        expect = self._ranks if plan.has_host_copies else (self._reply_rank,)
        call = self._send(STEP_METHOD, (plan,), ranks=None, expect=expect, future=future, mask_indices=indices)
        call.label = f"{STEP_METHOD} of step {plan.step}"
        self._deferred_step = future if self._defers_replies else None
        return future

    def can_sample_later(self) -> bool:
        found: list[bool] = self.collective_rpc("can_sample_later")  # type: ignore[assignment]
        return all(found)

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> None:
        self._group.check()
        indices = None
        if (fewer := remove_equal_masks(len(mask_rows), token_masks)) is not None:
            token_masks, indices = fewer
        payload = msgspec.msgpack.encode((step, mask_rows, token_masks))
        request = RPCRequest(self._next_id, SAMPLE_METHOD, payload, mask_indices=indices)
        self._enqueue(request, self._config.parallel.step_timeout)
        self._next_id += 1

    def on_failure(self, callback: FailureCallback) -> None:
        """As in Executor; `callback` is called from another thread."""
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
        else:  # another thread may still be shutting down
            self._group.terminate()

    # --- waiting, for RpcFuture

    def wait_for(self, future: RpcFuture[Any], timeout: float | None, *, cancel_on_timeout: bool) -> None:
        """Reads replies until `future` is resolved.

        Args:
            timeout: Seconds; None for a step, which has `step_timeout` and fails the executor when it is late.
            cancel_on_timeout: At the timeout, set a TimeoutError as the call's result and drop later replies.
                Otherwise the call can be waited for again.

        Raises:
            TimeoutError: The timeout has passed, and `cancel_on_timeout` is False.
        """
        start = time.monotonic()
        warn_at = start + _WARN_SECONDS
        stacks = True  # logged once per wait: a worker that hangs stays in the same place
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
        """Reads the replies that have arrived, without waiting."""
        if not self._finalizer.alive:
            return
        with contextlib.suppress(QueueTimeoutError):
            try:
                self._dispatch(self._replies.wait(0.0))
            except (PeerDiedError, QueueStoppedError) as e:
                self._fail_calls(self._root_cause(e))

    def request_deferred_reply(self, future: RpcFuture[Any]) -> None:
        """Asks the workers for the deferred reply of the last step, if `future` is its future."""
        if self._deferred_step is future and not future.is_resolved and self._finalizer.alive:
            self._deferred_step = None
            with contextlib.suppress(QueueError):  # the wait for the reply raises it again
                self._writer.enqueue(RPCRequest(FLUSH_ID, "", b""), timeout=self._config.parallel.step_timeout)

    # --- sending and receiving

    def _send(
        self,
        method: str,
        args: tuple[Any, ...],
        *,
        ranks: tuple[int, ...] | None,
        expect: Sequence[int],
        future: Any,
        mask_indices: list[int] | None = None,
    ) -> RpcCall:
        codec = codec_of(method)
        self._group.check()
        if not self._finalizer.alive:
            raise EngineDeadError(f"{method} was called after the workers had been shut down.")
        parallel = self._config.parallel
        limit = parallel.step_timeout if method == STEP_METHOD else parallel.start_timeout
        reply_from = expect[0] if method == STEP_METHOD and len(expect) == 1 else None
        request = RPCRequest(self._next_id, method, msgspec.msgpack.encode(args), ranks, reply_from, mask_indices)
        self._next_id += 1
        self._enqueue(request, limit)
        call = self._calls[request.id] = RpcCall(request.id, codec, expect, future)
        self._on_request_sent(request, args)
        return call

    def _enqueue(self, request: RPCRequest, limit: float) -> None:
        try:
            self._writer.enqueue(request, timeout=limit)
        except (PeerDiedError, QueueStoppedError) as e:
            raise self._root_cause(e) from None
        except QueueTimeoutError as e:
            late = list(dict.fromkeys([*self._busy(), *self._group.stopped_workers()])) or self._group.workers
            raise self._group.fail_with_root_cause(self._group.stuck_error(late, limit, "took no request")) from e

    def _on_request_sent(self, request: RPCRequest, args: tuple[Any, ...]) -> None:
        """Hook: a request has been sent. For subclasses whose workers cannot write to the activity table."""

    def _on_reply(self, reply: Reply, method: str | None) -> None:
        """Hook: a reply has been received; `method` is None where its call is no longer pending."""

    def _dispatch(self, readers: Sequence[MessageReader[Reply]]) -> None:
        for reader in readers:
            sender = self._group.workers[self._sender_of(reader)]
            try:
                reply, _ = reader.dequeue()
                error = None if reply.rank == sender.rank else _unreadable(sender, f"a reply as rank {reply.rank}")
            except (QueueCorruptError, msgspec.DecodeError) as e:
                error = _unreadable(sender, f"an unreadable reply: {e}", e)
            if error is not None:
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
                is_step = call.codec.name == STEP_METHOD
                results = [call.results[rank] for rank in sorted(call.results)]
                call.future.set_result(call.results[self._reply_rank] if is_step else results)

    def _sender_of(self, reader: MessageReader[Reply]) -> int:
        """The rank whose replies `reader` reads."""
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
            error = _unreadable(sender, f"another type than {call.label} returns: {e}", e)
            self._handle_failure(error, call, is_step=call.codec.name == STEP_METHOD)
            return False

    def _handle_failure(self, error: Exception, call: RpcCall | None, *, is_step: bool) -> None:
        if is_step:
            # The rows of this rank differ from those of the others now, so no later step could be right. If the death
            # of another rank is the cause, that is the error to report.
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
        # Ranks that wait for a stuck rank are as late as that one. A rank that has not begun this step is named first,
        # then the one that began it last.
        late.sort(key=lambda worker: (worker not in absent, -(worker.activity.step or 0), worker.activity.seconds))
        seconds = self._config.parallel.step_timeout
        self._fail_calls(
            self._group.fail_with_root_cause(self._group.stuck_error(late, seconds, "has not finished its step"))
        )

    def _busy(self) -> list[WorkerHandle]:
        return [worker for worker in self._group.workers if not worker.activity.is_idle]

    def _root_cause(self, error: PeerDiedError | QueueStoppedError) -> Exception:
        """The error behind a wait that ended: the failure of a worker, or the shutdown of the executor."""
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
        # A step that takes so long most likely hangs. Loading weights may take so long; then stacks are debug output.
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
    """The names of the workers, in rank order: `Worker_TP0`, `Worker_PP1_TP0`; `Worker` if there is only one."""
    if num_workers == 1:
        return ["Worker"]
    parallel = with_workers_as_ranks(parallel, devices_per_worker(parallel, num_workers))
    tp = parallel.tensor_parallel_size
    if num_workers != parallel.world_size:  # the platform's worker class decides which devices they drive
        return [f"Worker_{rank}" for rank in range(num_workers)]
    stage = ["" if parallel.pipeline_parallel_size == 1 else f"_PP{rank // tp}" for rank in range(num_workers)]
    shard = ["" if tp == 1 else f"_TP{rank % tp}" for rank in range(num_workers)]
    return [f"Worker{a}{b}" for a, b in zip(stage, shard)]


def _reply_rank(parallel: ParallelConfig, num_workers: int) -> int:
    """The rank that replies to a step: the first one of the last pipeline stage."""
    parallel = with_workers_as_ranks(parallel, devices_per_worker(parallel, num_workers))
    return num_workers - parallel.tensor_parallel_size if num_workers == parallel.world_size else 0


def _shut_down(
    group: WorkerGroup[Any],
    writer: MessageWriter,
    readers: Sequence[MessageReader[Reply]],
    activity_table: ActivityTable,
    pid: int,
) -> None:
    """Sends the stop request, terminates the group, and closes the queues and the activity table."""
    if os.getpid() != pid:  # a fork of the engine's process, which owns none of this
        return
    if group.is_monitor_thread():  # garbage collection runs in any thread; this one must go on watching
        args = (group, writer, readers, activity_table, pid)
        threading.Thread(target=_shut_down, args=args, name="worker-shutdown", daemon=True).start()
        return
    stop_is_sent = False
    try:
        if group.failure is None and group.workers and all(worker.is_ready for worker in group.workers):
            group.expect_exits()
            with contextlib.suppress(QueueError):
                writer.enqueue(RPCRequest(STOP_ID, "", b""), timeout=0.5)
                stop_is_sent = True
        group.terminate(gracefully=stop_is_sent)
    finally:  # also when Ctrl-C interrupts the lines above
        group.terminate()
        writer.close()
        for reader in readers:
            reader.close()
        group.close()
        activity_table.close()
