"""The request loop of a worker process: read a request, call the worker, send the reply, until the stop request.

Where a step's tokens stay on the device, its reply is deferred until the next step is launched or a flush request
arrives. The loop is the same in every kind of process that an executor runs workers in. No slow library is imported
before `build`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from mvllm.executor.process.activity_table import IDLE, ActivityTable
from mvllm.executor.process.process_utils import gc_paused
from mvllm.executor.rpc_messages import FLUSH_ID, STOP_ID, Reply, RPCRequest, codec_of, restore_equal_masks
from mvllm.logging import get_logger
from mvllm.messages.process_failure import describe_failure
from mvllm.platform.topology import WorkerContext

if TYPE_CHECKING:
    from mvllm.executor.message_queue import MessageReader, MessageWriter, ReaderHandle, RemoteReaderHandle
    from mvllm.worker.worker_wrapper import WorkerWrapper

logger = get_logger(__name__)


class WorkerProc:
    """The request loop of one rank.

    Args:
        name: The name of the worker, for errors.
        rank: This worker's rank.
        worker: Executes the requests.
        requests: This rank's end of rpc_broadcast_mq.
        replies: Its worker_response_mq.
        activity_table: Where the rank writes its activity.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        worker: WorkerWrapper,
        requests: MessageReader[RPCRequest],
        replies: MessageWriter,
        activity_table: ActivityTable,
    ) -> None:
        self._name = name
        self._rank = rank
        self._worker = worker
        self._requests = requests
        self._replies = replies
        self._activity_table = activity_table
        self._deferred_replies: deque[tuple[RPCRequest, int]] = deque()  # launched steps whose tokens are on the device

    @classmethod
    def build(
        cls,
        name: str,
        context: WorkerContext,
        platform: str,
        config: bytes,
        requests: ReaderHandle | RemoteReaderHandle,
        replies: MessageWriter,
        activity_table: ActivityTable,
    ) -> WorkerProc:
        """Loads the platform by its name and builds the worker; torch is imported here.

        Args:
            name, replies, activity_table: As above.
            context: Rank and launch settings of the worker.
            platform: The platform's name, by which this process finds the plugin.
            config: The engine's configuration, see config_codec.
            requests: The handle of its end of rpc_broadcast_mq, which is attached here.
        """
        from mvllm.executor.config_codec import decode_config
        from mvllm.executor.message_queue import MessageReader
        from mvllm.platform.choose import choose_platform

        rank = context.rank
        reader = MessageReader.attach(requests, RPCRequest)
        activity_table.write(rank, f"loading the platform {platform}")
        chosen = choose_platform(platform, isolated=False).platform
        activity_table.write(rank, "importing the worker")
        with gc_paused():
            from mvllm.worker.worker_wrapper import WorkerWrapper

            worker = WorkerWrapper(decode_config(config), chosen, context)
        activity_table.write(rank, IDLE)
        return cls(name, rank, worker, reader, replies, activity_table)

    def worker_busy_loop(self) -> None:
        """Serves requests until the stop request. Waiting for the next one uses no CPU."""
        self._activity_table.write(self._rank, IDLE)
        while True:
            try:
                request, _ = self._requests.dequeue()
            except Exception:
                self._activity_table.write(self._rank, "reading a request")
                raise
            if request.id == STOP_ID:
                return
            if request.method == "sample_tokens":
                self._serve(request, self._sample)
                continue
            if request.method != "execute_model":
                self._send_deferred_replies(keep=0)
            if request.id != FLUSH_ID and request.is_addressed_to(self._rank):
                self._serve(request, self._execute)
            self._send_deferred_replies(keep=1)

    def _send_deferred_replies(self, *, keep: int) -> None:
        """Sends deferred replies in order, except the last `keep`: the device still computes those steps."""
        while len(self._deferred_replies) > keep:
            request, step = self._deferred_replies.popleft()
            self._serve(request, functools.partial(self._collect, step=step))

    def _serve(self, request: RPCRequest, work: Callable[[RPCRequest], Reply | None]) -> None:
        reply: Reply | None
        try:
            reply = work(request)
        except Exception as e:
            activity = str(self._activity_table.read(self._rank))
            failure = describe_failure(e, name=self._name, activity=activity, rank=self._rank)
            logger.debug("%s failed", activity, exc_info=e)
            reply = Reply(request.id, self._rank, b"", failure)
        if reply is not None:
            self._replies.enqueue(reply)
        # Not in a `finally`: an exception that ends the process leaves its activity in the table.
        self._activity_table.write(self._rank, IDLE, request.id)

    def _execute(self, request: RPCRequest) -> Reply | None:
        """Executes a request; returns the reply, if this rank sends one now."""
        self._activity_table.write(self._rank, request.method, request.id)
        args = codec_of(request.method).arguments.decode(request.args)
        result: object
        if request.method == "execute_model":
            self._activity_table.write(self._rank, request.method, request.id, args[0].step)
            if request.mask_indices is not None:
                args[0].token_masks = restore_equal_masks(args[0].token_masks, request.mask_indices)
            result = self._worker.execute_model(*args)
            if result is None:
                self._deferred_replies.append((request, args[0].step))
                return None
        else:
            result = self._worker.call(request.method, *args)
        return self._reply(request, result)

    def _sample(self, request: RPCRequest) -> Reply | None:
        """Samples the step launched last; returns the reply to that step, if its tokens are on the host."""
        number, mask_rows, token_masks = codec_of(request.method).arguments.decode(request.args)
        if request.mask_indices is not None:
            token_masks = restore_equal_masks(token_masks, request.mask_indices)
        launched, step = self._deferred_replies[-1]
        self._activity_table.write(self._rank, launched.method, request.id, step)
        output = self._worker.sample_tokens(number, mask_rows, token_masks)
        if output is None:
            return None
        self._deferred_replies.pop()
        return self._reply(launched, output)

    def _collect(self, request: RPCRequest, step: int) -> Reply | None:
        """The reply to a step that was launched earlier."""
        self._activity_table.write(self._rank, request.method, request.id, step)
        return self._reply(request, self._worker.call("collect_output", step))

    def _reply(self, request: RPCRequest, result: object) -> Reply | None:
        if request.reply_from not in (None, self._rank):
            return None
        return Reply(request.id, self._rank, msgspec.msgpack.encode(result))

    def shutdown(self) -> None:
        """Releases the worker."""
        self._activity_table.write(self._rank, "shutdown")
        self._worker.shutdown()
