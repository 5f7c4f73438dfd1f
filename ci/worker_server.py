"""The process that ci/forked_workers.py forks xdist's workers from: `main(fd, *pytest's arguments)` in sys.argv."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import signal
import socket
import sys

import pytest

MAX_MESSAGE = 16


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


class ThreadWatch:
    """Finds the file with whose import the process has more than one thread."""

    culprit: str | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if self.culprit is None and count_threads() > 1:
            self.culprit = report.nodeid


def main() -> None:
    """Collects the tests, then forks a worker for each message of the controller, until it closes its socket."""
    end = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(end.fileno(), False)
    arguments = [*sys.argv[2:], "-n", "0", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    sys.argv[:] = ["-c"]
    threads = ThreadWatch()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        pytest.main(arguments, plugins=[threads])
    gc.collect()
    gc.freeze()
    is_possible = count_threads() == 1
    if not is_possible:
        print(f"note: {threads.culprit} starts a thread when it is imported; each worker imports all", file=sys.stderr)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # finished workers are reaped
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(end, MAX_MESSAGE, 2)
        if not message:
            return
        pid = os.fork() if is_possible else None
        if pid == 0:
            end.close()
            become_worker(*descriptors)
            return
        end.send(str(pid).encode() if pid else b"")
        for fd in descriptors:
            os.close(fd)


def become_worker(stdin: int, stdout: int) -> None:
    """Does what a new interpreter with these descriptors would do for execnet."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, target in ((stdin, 0), (stdout, 1)):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    program = ast.literal_eval(sys.stdin.readline())  # the controller's execnet sends its worker's program as a literal
    exec(program, {"__name__": "__main__"})  # noqa: S102, it is what the controller starts other interpreters with
