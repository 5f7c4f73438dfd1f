"""A worker's loop: take a request, call the worker, answer; until told to stop.

Where a step's tokens stay on the device, its answer comes after the launch of the next step, or as soon as it is asked
for.

The same in every kind of process that an executor runs workers in. Nothing heavy is imported before `build`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from mvllm.executor.process.activity_table import IDLE, ActivityTable
from mvllm.executor.process.process_utils import gc_paused
from mvllm.executor.rpc_messages import FLUSH_ID, STOP_ID, Reply, Request, codec_of
from mvllm.logging import get_logger
from mvllm.messages.process_failure import describe_failure
from mvllm.platform.topology import WorkerContext

if TYPE_CHECKING:
    from mvllm.executor.message_queue import MessageReader, MessageWriter, ReaderHandle, RemoteReaderHandle
    from mvllm.worker.worker_wrapper import WorkerWrapper

logger = get_logger(__name__)


class WorkerProc:
    """One rank's loop. The same in every kind of worker process.

    Args:
        name: For errors.
        rank: This worker's rank.
        worker: Does the work.
        requests: This rank's end of rpc_broadcast_mq.
        replies: Its worker_response_mq.
        board: Where it says what it is doing.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        worker: WorkerWrapper,
        requests: MessageReader[Request],
        replies: MessageWriter,
        board: ActivityTable,
    ) -> None:
        self._name = name
        self._rank = rank
        self._worker = worker
        self._requests = requests
        self._replies = replies
        self._activity_table = board
        self._deferred_replies: deque[tuple[Request, int]] = (
            deque()
        )  # steps launched, whose tokens are still on the device

    @classmethod
    def build(
        cls,
        name: str,
        context: WorkerContext,
        platform: str,
        config: bytes,
        requests: ReaderHandle | RemoteReaderHandle,
        replies: MessageWriter,
        board: ActivityTable,
    ) -> WorkerProc:
        """Finds the platform by its name and builds the worker; this is where torch is imported.

        Args:
            name, replies, board: As above.
            context: Which worker it is.
            platform: The platform's name; the plugin is found again by it.
            config: The engine's configuration, see config_codec.
            requests: Its end of rpc_broadcast_mq, which is attached here.
        """
        from mvllm.executor.config_codec import decode_config
        from mvllm.executor.message_queue import MessageReader
        from mvllm.platform.choose import choose_platform

        rank = context.rank
        reader = MessageReader.attach(requests, Request)
        board.write(rank, f"loading the platform {platform}")
        chosen = choose_platform(platform).platform
        board.write(rank, "importing the worker")
        with gc_paused():
            from mvllm.worker.worker_wrapper import WorkerWrapper

            worker = WorkerWrapper(decode_config(config), chosen, context)
        board.write(rank, IDLE)
        return cls(name, rank, worker, reader, replies, board)

    def worker_busy_loop(self) -> None:
        """Serves requests until the one that says stop. The wait for the next one costs nothing."""
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
                self._send_deferred_replies(0)
            if request.id != FLUSH_ID and request.is_addressed_to(self._rank):
                self._serve(request, self._execute)
            self._send_deferred_replies(1)

    def _send_deferred_replies(self, but: int) -> None:
        """Sends the replies that are owed, in order, but for the last so many: the device is busy with those."""
        while len(self._deferred_replies) > but:
            request, step = self._deferred_replies.popleft()
            self._serve(request, functools.partial(self._collect, step=step))

    def _serve(self, request: Request, work: Callable[[Request], Reply | None]) -> None:
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
        # Not in a `finally`: what ends the process itself leaves on the board what it was doing.
        self._activity_table.write(self._rank, IDLE, request.id)

    def _execute(self, request: Request) -> Reply | None:
        """The answer, where this rank is to give one."""
        self._activity_table.write(self._rank, request.method, request.id)
        args = codec_of(request.method).arguments.decode(request.args)
        result: object
        if request.method == "execute_model":
            self._activity_table.write(self._rank, request.method, request.id, args[0].step)
            result = self._worker.execute_model(*args)
            if result is None:
                self._deferred_replies.append((request, args[0].step))
                return None
        else:
            result = self._worker.call(request.method, *args)
        return self._reply(request, result)

    def _sample(self, request: Request) -> Reply | None:
        """Samples the step that was launched last; the answer to that step, if its tokens are there."""
        args = codec_of(request.method).arguments.decode(request.args)
        launched, step = self._deferred_replies[-1]
        self._activity_table.write(self._rank, launched.method, request.id, step)
        output = self._worker.sample_tokens(*args)
        if output is None:
            return None
        self._deferred_replies.pop()
        return self._reply(launched, output)

    def _collect(self, request: Request, step: int) -> Reply | None:
        """The answer to a step that has been launched before."""
        self._activity_table.write(self._rank, request.method, request.id, step)
        return self._reply(request, self._worker.call("collect_output", step))

    def _reply(self, request: Request, result: object) -> Reply | None:
        if request.reply_from not in (None, self._rank):
            return None
        return Reply(request.id, self._rank, msgspec.msgpack.encode(result))

    def shutdown(self) -> None:
        """Releases the worker."""
        self._activity_table.write(self._rank, "shutdown")
        self._worker.shutdown()
