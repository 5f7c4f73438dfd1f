"""A worker process: `python -m mvllm.executor.worker_main <name> <control socket>`.

    start   name itself, promise to die with its parent, read WorkerStartArgs from the control socket
    build   find the platform by name, build the worker (this is where torch is imported), say "ready"
    loop    take requests until told to stop: WorkerProc

Nothing heavy is imported before WorkerStartArgs is there, and the platform's environment variables are set before this
program starts.
"""

from __future__ import annotations

from mvllm.executor.message_queue import MessageWriter
from mvllm.executor.process.child_startup import initialize_child
from mvllm.executor.process.handshake import Handshake, WorkerStartArgs, send_message
from mvllm.executor.process.process_utils import exit_process, write_crash_report
from mvllm.executor.worker_proc import WorkerProc


def main() -> None:
    """The program. Never returns."""
    start, control, board = initialize_child(WorkerStartArgs)
    try:
        replies = MessageWriter.attach(start.replies)
        proc = WorkerProc.build(start.name, start.context, start.platform, start.config, start.requests, replies, board)
    except Exception as e:  # noqa: BLE001  (travels to the executor)
        send_message(control, Handshake.of_error(e, start.name, start.context.rank, board))
        exit_process(1)
    send_message(control, Handshake())
    try:
        proc.worker_busy_loop()
    except Exception as e:  # noqa: BLE001  (a queue that cannot be read or written any more; told by way of the parent)
        write_crash_report(start.stack_fd, e)
        exit_process(1)
    proc.shutdown()
    exit_process(0)


if __name__ == "__main__":
    main()
