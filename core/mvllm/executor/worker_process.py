"""A worker process: `python -m mvllm.executor.worker_process <name> <control socket>`.

    start   name itself, promise to die with its parent, read WorkerStart from the control socket
    build   find the platform by name, build the worker (this is where torch is imported), say "ready"
    loop    take a request, call the worker, answer; until told to stop. Where a step's tokens stay on the device, its
            answer comes after the launch of the next step, or as soon as it is asked for

Nothing heavy is imported before WorkerStart is there, and the platform's environment variables are set before this
program starts.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from mvllm.executor.handshake import Handshake, WorkerStart, receive_start, send_frame
from mvllm.executor.process_tools import (
    PrefixedStream,
    die_with_parent,
    dump_stacks_to,
    set_process_name,
    watch_parent,
)
from mvllm.executor.rpc import FLUSH_ID, STOP_ID, Reply, Request, codec_of, describe_failure
from mvllm.executor.status_board import IDLE, StatusBoard
from mvllm.logging import configure_logging, get_logger

if TYPE_CHECKING:
    from mvllm.executor.message_queue import MessageReader, MessageWriter
    from mvllm.worker.wrapper import WorkerWrapper

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
        board: StatusBoard,
    ) -> None:
        self._name = name
        self._rank = rank
        self._worker = worker
        self._requests = requests
        self._replies = replies
        self._board = board
        self._owed: deque[tuple[Request, int]] = deque()  # steps launched, whose tokens are still on the device

    def worker_busy_loop(self) -> None:
        """Serves requests until the one that says stop. The wait for the next one costs nothing."""
        self._board.write(self._rank, IDLE)
        while True:
            request, _ = self._requests.dequeue()
            if request.id == STOP_ID:
                return
            if request.method != "execute_model":
                self._pay(0)
            if request.id != FLUSH_ID and request.concerns(self._rank):
                self._serve(request, self._execute)
            self._pay(1)

    def _pay(self, but: int) -> None:
        """Sends the replies that are owed, in order, but for the last so many: the device is busy with those."""
        while len(self._owed) > but:
            request, step = self._owed.popleft()
            self._serve(request, functools.partial(self._collect, step=step))

    def _serve(self, request: Request, work: Callable[[Request], Reply | None]) -> None:
        reply: Reply | None
        try:
            reply = work(request)
        except Exception as e:
            activity = str(self._board.read(self._rank))
            failure = describe_failure(e, rank=self._rank, pid=os.getpid(), name=self._name, activity=activity)
            logger.debug("%s failed", activity, exc_info=e)
            reply = Reply(request.id, self._rank, b"", failure)
        if reply is not None:
            self._replies.enqueue(reply)
        # Not in a `finally`: what ends the process itself leaves on the board what it was doing.
        self._board.write(self._rank, IDLE, request.id)

    def _execute(self, request: Request) -> Reply | None:
        """The answer, where this rank is to give one."""
        self._board.write(self._rank, request.method, request.id)
        args = codec_of(request.method).arguments.decode(request.args)
        result: object
        if request.method == "execute_model":
            self._board.write(self._rank, request.method, request.id, args[0].step)
            result = self._worker.execute_model(*args)
            if result is None:
                self._owed.append((request, args[0].step))
                return None
        else:
            result = self._worker.call(request.method, *args)
        return self._reply(request, result)

    def _collect(self, request: Request, step: int) -> Reply | None:
        """The answer to a step that has been launched before."""
        self._board.write(self._rank, request.method, request.id, step)
        return self._reply(request, self._worker.call("collect_output", step))

    def _reply(self, request: Request, result: object) -> Reply | None:
        if request.reply_from not in (None, self._rank):
            return None
        return Reply(request.id, self._rank, msgspec.msgpack.encode(result))


def main() -> None:
    """The program. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name, control_fd, parent_pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent_pid)
    set_process_name(name)
    control = socket.socket(fileno=control_fd)
    try:
        start = receive_start(control)
    except (EOFError, ConnectionError):
        os._exit(1)
    watch_parent(control)
    _adopt(start)
    board = StatusBoard(start.board_fd)
    try:
        proc, worker = _build(start, board)
    except Exception as e:  # noqa: BLE001  (travels to the executor)
        activity = str(board.read(start.context.rank))
        failure = describe_failure(e, rank=start.context.rank, pid=os.getpid(), name=start.name, activity=activity)
        send_frame(control, Handshake(failure))
        _leave(1)
    send_frame(control, Handshake())
    proc.worker_busy_loop()
    board.write(start.context.rank, "shutdown")
    worker.shutdown()
    _leave(0)


def _adopt(start: WorkerStart) -> None:
    """Makes this interpreter like its parent: module search path, logging, and stacks where they are looked for."""
    sys.path[:] = start.sys_path
    if start.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start.python_path
    dump_stacks_to(start.stack_fd)
    prefix = f"({start.name} pid={os.getpid()}) "
    sys.stdout = PrefixedStream(sys.stdout, prefix)
    sys.stderr = PrefixedStream(sys.stderr, prefix)
    configure_logging(start.log_level)


def _build(start: WorkerStart, board: StatusBoard) -> tuple[WorkerProc, WorkerWrapper]:
    from mvllm.executor.config_codec import decode_config
    from mvllm.executor.message_queue import MessageReader, MessageWriter
    from mvllm.platform.choose import choose_platform

    rank = start.context.rank
    requests = MessageReader.attach(start.requests, Request)
    replies = MessageWriter.attach(start.replies)
    board.write(rank, f"loading the platform {start.platform}")
    platform = choose_platform(start.platform).platform
    board.write(rank, "importing the worker")
    from mvllm.worker.wrapper import WorkerWrapper

    worker = WorkerWrapper(decode_config(start.config), platform, start.context)
    board.write(rank, IDLE)
    return WorkerProc(start.name, rank, worker, requests, replies, board), worker


def _leave(status: int) -> None:
    """Ends the process without the interpreter's and the libraries' destructors, which have been seen to hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
