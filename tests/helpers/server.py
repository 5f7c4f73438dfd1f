"""Starts a server process, and sends requests to it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.helpers.processes import TAG, new_tag, tagged_processes, wait_until
from tests.helpers.response_schemas import CheckedClient

START_SECONDS = 180
TEMPLATE_PROCESS = "mvllm.entrypoints.openai.common.chat_template_process"
SMALL = ("--kv-cache-memory-bytes", str(64 << 20))


GRAMMAR_PROCESSES = ("mvllm.structured_output.sandbox_main", "mvllm.structured_output.validation_main")


class ServerProcess:
    """A `mvllm serve` process, from its start to its end.

    Args:
        folder: Folder for its log.
        arguments: Arguments after the command.
        environment: Additional environment variables.

    Attributes:
        command: The command of `mvllm`.
    """

    command = "serve"

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.tag = new_tag()
        self._arguments = arguments
        self._log = folder / f"server-{self.tag[:8]}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mvllm.entrypoints.cli.main", self.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, TAG: self.tag, "OMP_NUM_THREADS": "1", **environment},
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *unused: object) -> None:
        self.end()

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def url(self) -> str:
        """Waits until the server listens; returns its address."""
        self.wait_for_log(r"Listening at (http\S+);")
        found = re.search(r"Listening at (http\S+);", self.log)
        assert found
        return found[1]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def wait_for_log(self, pattern: str, seconds: float = START_SECONDS) -> None:
        """Waits until the log matches the pattern; raises if the server exits before."""

        def is_found() -> bool:
            if re.search(pattern, self.log):
                return True
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log[-3000:]}"
            return False

        wait_until(is_found, seconds, lambda: f"{pattern} in the log:\n{self.log[-3000:]}")

    def wait_ready(self) -> ServerProcess:
        self.wait_for_log(r"Ready at ")
        return self

    def client(self, **settings: Any) -> httpx2.Client:
        """A client. What it receives from a server with one model is compared with the description of the API."""
        kind = httpx2.Client if self.command != "serve" or "--models" in self._arguments else CheckedClient
        return kind(base_url=self.url, timeout=settings.pop("timeout", 120), trust_env=False, **settings)

    def pids(self) -> set[int]:
        """Process ids of the server and its children, except `sandbox_pids`, which are replaced on demand."""
        return {process.pid for process in tagged_processes(self.tag)} - self.sandbox_pids()

    def sandbox_pids(self) -> set[int]:
        """Process ids of the sandboxes for grammars, chat templates and the validation of outputs."""
        found = set()
        for process in tagged_processes(self.tag):
            with contextlib.suppress(psutil.NoSuchProcess):
                if {*GRAMMAR_PROCESSES, TEMPLATE_PROCESS} & set(process.cmdline()):
                    found.add(process.pid)
        return found

    def engine_core(self) -> psutil.Process:
        wait_until(self._engine_cores, START_SECONDS, lambda: self.log)
        [core] = self._engine_cores()
        return core

    def _engine_cores(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "EngineCore" in process.cmdline():
                    found.append(process)
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(120)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(120)

    def exchange(self, data: bytes, *, wait: float = 60.0, close_after: int | None = None) -> bytes:
        """Sends raw bytes over a new connection; returns all received bytes until its end.

        Args:
            wait: Timeout of the answer in seconds.
            close_after: Close the connection after this many received bytes.
        """
        with socket.create_connection(self.address, timeout=wait) as connection:
            with contextlib.suppress(ConnectionError):  # the server may answer and close before everything is sent
                connection.sendall(data)
            return b"".join(self._answers(connection, close_after))

    @staticmethod
    def _answers(connection: socket.socket, close_after: int | None) -> Iterator[bytes]:
        received = 0
        while True:
            try:
                piece = connection.recv(1 << 16)
            except ConnectionError:
                return
            if not piece:
                return
            yield piece
            received += len(piece)
            if close_after is not None and received >= close_after:
                return


def wait_idle(client: httpx2.Client, seconds: float = 30) -> None:
    """Waits until the engine is idle."""

    def idle() -> bool:
        load = client.get("/load").json()
        return not (load["server_load"] or load["num_requests_running"] or load["num_requests_waiting"])

    wait_until(idle, seconds, lambda: str(client.get("/load").json()))


@contextlib.contextmanager
def as_before(server: ServerProcess, client: httpx2.Client) -> Iterator[None]:
    """Context manager; afterwards an ordinary request must be answered by the same processes."""
    before = settled_pids(server)
    yield
    ask = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    answer = client.post("/v1/completions", json=ask)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, answer.text
    wait_until(lambda: server.pids() == before, 120, lambda: f"the processes {before} run, found {server.pids()}")


def settled_pids(server: ServerProcess) -> set[int]:
    """`server.pids()` without a sandbox that is being started: until its program runs, it looks like its parent."""
    found = server.pids()
    while (again := server.pids()) != found:
        found = again
        time.sleep(0.05)
    return found


def assert_idle(server: ServerProcess, share: float = 0.01) -> None:
    """Asserts that all processes together use less than a share of one CPU.

    Reads the kernel's scheduler statistics of each thread, in nanoseconds. Uses the lowest of a few measurements: the
    machine may still do work for the last request.
    """
    measured = []
    for _ in range(4):
        before, begun = cpu_seconds(server), time.monotonic()
        time.sleep(2.0)
        measured.append((cpu_seconds(server) - before) / (time.monotonic() - begun))
        if measured[-1] < share:
            return
    raise AssertionError(f"it used these shares of a processor: {measured}")


def cpu_seconds(server: ServerProcess) -> float:
    """CPU time of all threads of a server since each one's start."""
    total, found = 0, 0
    for pid in server.pids():
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
                total += int(path.read_text().split()[0])
                found += 1
    assert found, "the kernel keeps no account of threads"
    return total / 1e9


def head_of(method: str, path: str, *headers: str) -> bytes:
    """The headers of a raw request with `Connection: close`."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]).encode()


def raw_post(path: str, body: bytes, *headers: str) -> bytes:
    """A whole raw request."""
    return head_of("POST", path, "Content-Type: application/json", f"Content-Length: {len(body)}", *headers) + body
