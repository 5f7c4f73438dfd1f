"""The mixed load: requests of many lengths that arrive one by one, streamed from an OpenAI-compatible server.

Arrivals are a Poisson process whose rate exceeds the machine's throughput, so that requests queue, join batches and
leave them at different times. The result is the time from the first arrival to the last answer; the latencies of each
request (time to first token, time between tokens, end-to-end time) are recorded as well.

The client is a few lines of HTTP/1.1 on asyncio: it shares the cores with the server, so it must use little CPU.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.perf.cpu_bench.engines import Engine
from tests.perf.cpu_bench.models import MAX_POSITIONS
from tests.perf.cpu_bench.workloads import FIRST_ID

NAME = "bench"  # model name on the servers
READY_LIMIT = 300.0
REQUEST_LIMIT = 300.0


@dataclass(frozen=True)
class MixedLoad:
    """Parameters of the load.

    Attributes:
        requests: Number of requests.
        rate: Arrivals per second, on average.
        prompt, output: Smallest and largest numbers of tokens, uniformly distributed.
    """

    requests: int = 48
    rate: float = 8.0
    prompt: tuple[int, int] = (32, 768)
    output: tuple[int, int] = (16, 128)


@dataclass(frozen=True)
class Arrival:
    """One request: arrival time in seconds from the start, prompt, and number of tokens to generate."""

    at: float
    prompt: list[int]
    output: int


@dataclass(frozen=True)
class Answer:
    """Latencies of one request, in seconds from its arrival."""

    first: float
    last: float
    tokens: int


def arrivals_of(load: MixedLoad, run: int, vocab_size: int, seed: int = 0) -> list[Arrival]:
    """The requests of one run: the same for every engine, different in every run."""
    rng = random.Random(f"{seed} mixed {run}")
    found, at = [], 0.0
    for _ in range(load.requests):
        prompt = [rng.randrange(FIRST_ID, vocab_size) for _ in range(rng.randint(*load.prompt))]
        found.append(Arrival(at, prompt, rng.randint(*load.output)))
        at += rng.expovariate(load.rate)
    return found


async def drive(url: str, arrivals: list[Arrival]) -> tuple[float, list[Answer]]:
    """Sends every request when it is due; returns the seconds until the end of the last answer, and the answers.

    Raises:
        RuntimeError: A request was rejected, or returned a different number of tokens than requested.
    """
    start = time.perf_counter()

    async def one(arrival: Arrival) -> Answer:
        await asyncio.sleep(start + arrival.at - time.perf_counter())
        return await asyncio.wait_for(_complete(url, arrival), REQUEST_LIMIT)

    answers = await asyncio.gather(*(one(arrival) for arrival in arrivals))
    return time.perf_counter() - start, list(answers)


async def _complete(url: str, arrival: Arrival) -> Answer:
    """POST /v1/completions, streamed; each event with text or a token count is one arrival of tokens."""
    address = urlsplit(url)
    body = json.dumps(
        {
            "model": NAME,
            "prompt": arrival.prompt,
            "max_tokens": arrival.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            raise RuntimeError(f"{url} answered {status.strip()}: {(await reader.read(2000)).decode(errors='replace')}")
        first, tokens = 0.0, -1
        async for line in reader:
            # Only event lines begin with this; chunk sizes and headers do not.
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if not first and event.get("choices"):
                first = time.perf_counter() - began
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    finally:
        writer.close()
    if tokens != arrival.output:
        raise RuntimeError(f"{url} gave {tokens} tokens where {arrival.output} were asked for")
    return Answer(first, time.perf_counter() - began, tokens)


def summary(answers: list[Answer]) -> dict[str, float]:
    """Milliseconds: mean, median and 99th percentile of the time to first token, between tokens, and end to end."""
    found: dict[str, float] = {}
    between = [(a.last - a.first) / (a.tokens - 1) for a in answers if a.tokens > 1]
    for name, values in (
        ("ttft", [a.first for a in answers]),
        ("tpot", between),
        ("e2el", [a.last for a in answers]),
    ):
        ordered = sorted(values)
        found[f"mean_{name}_ms"] = 1e3 * statistics.mean(ordered)
        found[f"median_{name}_ms"] = 1e3 * statistics.median(ordered)
        found[f"p99_{name}_ms"] = 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return found


class Server:
    """An engine's HTTP server, until the block ends. A context manager.

    Args:
        engine: An engine with `server` set.
        model: The model in its format.
        threads: Threads to compute with.
        log: File for its output.

    Attributes:
        engine: The engine of the server.
        url: Base URL.

    Raises:
        RuntimeError: The server exited, or was not ready in time.
    """

    def __init__(self, engine: Engine, model: Path, *, threads: int, log: Path) -> None:
        assert engine.server is not None
        self.engine = engine
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [
            *(str(engine.python), *engine.server, str(model)),
            *("--served-model-name", NAME, "--max-model-len", str(MAX_POSITIONS)),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=engine.server_environment(threads),
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        deadline = time.monotonic() + READY_LIMIT
        port = urlsplit(self.url).port or 0
        while time.monotonic() < deadline and self._process.poll() is None:
            # Servers without this route are ready once they respond.
            if _status(port, "/health/ready") in (b"200", b"404") and _status(port, "/health") == b"200":
                return self
            time.sleep(0.5)
        self.__exit__()
        tail = "\n    ".join(self._log.read_text(errors="replace").strip().splitlines()[-5:])
        raise RuntimeError(
            f"the server of {self.engine.name} was not ready; its output ends ({self._log}):\n    {tail}"
        )

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _status(port: int, path: str) -> bytes:
    """HTTP status of a GET from the server on `port`; nothing if there is no server yet."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as s:
            s.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return s.recv(100).partition(b" ")[2][:3]
    except OSError:
        return b""
