"""The program of a worker process, which `child_program` starts with `<name> <control socket> <parent pid>`.

    start   set the process name, tie the process to its parent, read WorkerStartArgs from the control socket
    build   load the platform, build the worker (torch is imported here), send the Handshake
    loop    serve requests until the stop request: WorkerProc

No slow library is imported before WorkerStartArgs has been read. The platform's environment variables are set before
this program starts.
"""

from __future__ import annotations

from mvllm.executor.message_queue import MessageWriter
from mvllm.executor.process.child_startup import initialize_child
from mvllm.executor.process.handshake import Handshake, WorkerStartArgs, send_message
from mvllm.executor.process.process_utils import exit_process, write_crash_report
from mvllm.executor.worker_proc import WorkerProc


def main() -> None:
    """The program. Never returns."""
    start, control, activity_table = initialize_child(WorkerStartArgs)
    try:
        replies = MessageWriter.attach(start.replies)
        proc = WorkerProc.build(
            start.name, start.context, start.platform, start.config, start.requests, replies, activity_table
        )
    except Exception as e:  # noqa: BLE001  (sent to the executor)
        send_message(control, Handshake.of_error(e, start.name, start.context.rank, activity_table))
        exit_process(1)
    send_message(control, Handshake())
    try:
        proc.worker_busy_loop()
    except Exception as e:  # noqa: BLE001  (a queue is broken: the parent reads the report)
        write_crash_report(start.stack_fd, e)
        exit_process(1)
    proc.shutdown()
    exit_process(0)


if __name__ == "__main__":
    main()
