"""A pytest plugin that forks the workers of xdist from one process that has imported the tests: `-p ci.forked_workers`.

A worker that starts by itself imports torch, transformers and all test files, and on a fresh clone compiles the files.
That takes 15 to 30 seconds of a core, and is the same in each worker. With this plugin one process does it once:

    controller ──socket──> worker server      collects the tests, has one thread (ci/worker_server.py)
                             └─ fork ──> worker gw0, gw1, ...     connected to the controller with pipes, as always

A worker starts as a new interpreter if it cannot be forked: not on Linux, or a library has started a thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

COMMAND = "from ci.worker_server import main; main()"
"""Run with `python -c`, so that `__main__` has no file that `multiprocessing` would import again."""
MAX_MESSAGE = 16
"""Most bytes of an answer: the worker's process id, or nothing if it cannot be forked."""


class WorkerServer:
    """The controller's end of the worker server.

    Args:
        arguments: pytest's command line.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-u", "-c", COMMAND, str(theirs.fileno()), *arguments]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]).returncode = 0

    def fork(self, stdin: int, stdout: int) -> int | None:
        """Forks a worker with these descriptors; returns its process id, or None if it cannot be forked."""
        try:
            socket.send_fds(self._socket, [b"fork"], [stdin, stdout])
            answer = self._socket.recv(MAX_MESSAGE)
        except OSError:
            return None
        return int(answer) if answer else None


class ForkedWorker:
    """A worker as execnet sees the process of a gateway: the methods of `subprocess.Popen` that it calls."""

    def __init__(self, pid: int, stdin: Any, stdout: Any) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout

    def wait(self) -> int:
        """Waits until the process has ended. The server, its parent, reaps it."""
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(self.pid, 0)
                time.sleep(0.05)
        return 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    """Stands in for the `subprocess` module from which execnet starts workers."""

    PIPE = subprocess.PIPE

    def __init__(self, server: WorkerServer) -> None:
        self._server = server

    def Popen(self, args: list[str], **pipes: Any) -> Any:  # the name that execnet calls
        (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
        pid = self._server.fork(their_stdin, their_stdout)
        os.close(their_stdin)
        os.close(their_stdout)
        if pid is None:
            os.close(stdin)
            os.close(stdout)
            return subprocess.Popen(args, **pipes)
        return ForkedWorker(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))


@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Lets execnet fork workers, in the controller before the first one starts."""
    if sys.platform != "linux":
        return
    from execnet import gateway_base

    forks = Forks(WorkerServer([str(one) for one in config.invocation_params.args]))
    gateway_base.ThreadExecModel.subprocess = property(lambda _: forks)
