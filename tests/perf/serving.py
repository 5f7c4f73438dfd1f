"""Benchmark of the HTTP server: throughput and CPU use.

    python tests/perf/serving.py [--streams 1 64 256] [--seconds 4] [--whole]

On the null platform, which computes nothing. Starts a server process. Each stream is a client in this process that
sends one request at a time over a persistent connection: 32 prompt tokens, 64 output tokens, one server-sent event per
token (`--whole`: one response without streaming). Prints requests/s, tokens/s, tokens per event, and the CPU use of the
server and engine core processes. Requires mvllm-null-device, installed or on PYTHONPATH with its metadata.

    python tests/perf/serving.py --model FOLDER [--rounds 3] [--requests 256 1024] [--temperature 0] \\
        [--server "before=/other/.venv/bin/mvllm serve {model} --port {port}"] [--server "OTHER=..."]

With a model, on one or several servers that are up at the same time and measured in turn, round after round, with the
client of `mvllm bench serve`: at most 256 requests at a time, 32 tokens in and 64 out. A command line may begin with
variables. Prints medians over the rounds: output tokens/s, also per second of CPU of all processes (server, engine core
and client); TTFT; CPU time a token by process; and the core's steps, from `/metrics`, with the CPU time of one.

Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.plugins import null_platform_path  # noqa: E402
from tests.helpers.server import ServerProcess  # noqa: E402

PROMPT, OUTPUT = 32, 64
SETTINGS = ("--platform", "null", "--load-format", "dummy", "--kv-cache-memory-bytes", str(2**28),
            "--max-num-batched-tokens", "8192", "--no-access-log")  # fmt: skip

CONCURRENCY = 256
START_SECONDS = 180


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--model", help="a folder; without one, the null platform")
    parser.add_argument("--server", action="append", metavar="NAME=COMMAND", help="by default this environment's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--temperature", type=float, help="the server's default, if not given")
    args = parser.parse_args()
    if args.model is not None:
        own = f"{sys.executable} -m mvllm.entrypoints.cli.main serve {{model}} --port {{port}} --no-access-log"
        compare(args.model, args.server or [f"mvllm={own}"], args.rounds, args.requests, args.temperature)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = [*null_platform_path(Path(folder)), os.environ.get("PYTHONPATH", "")]
        with ServerProcess(Path(folder), "demo", "--port", "0", *SETTINGS, PYTHONPATH=os.pathsep.join(path)) as server:
            server.wait_ready()
            asyncio.run(load(server, 16, 0.5, not args.whole, show=False))
            for streams in args.streams:
                asyncio.run(load(server, streams, args.seconds, not args.whole, show=True))


def request(rng: random.Random, stream: bool) -> bytes:
    body = {
        "prompt": [rng.randrange(16, 500) for _ in range(PROMPT)],
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }
    data = json.dumps(body).encode()
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    head = f"POST /v1/completions HTTP/1.1\r\n{headers}"
    return head.encode() + b"\r\n\r\n" + data


async def load(server: ServerProcess, streams: int, seconds: float, stream: bool, *, show: bool) -> None:
    processes = [psutil.Process(server.process.pid), server.engine_core()]
    host, port = server.address
    count = [0, 0]
    rng = random.Random(0)

    async def client(data: bytes, deadline: float) -> None:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        while time.perf_counter() < deadline:
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 OK" in head
            if stream:
                body = b""
                while not body.endswith(b"0\r\n\r\n"):
                    chunk = await reader.read(1 << 18)
                    assert chunk
                    count[1] += chunk.count(b"data: {")
                    body = body[-8:] + chunk
            else:
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                count[1] += 1
            count[0] += 1
        writer.close()

    begin = time.perf_counter()
    cpu_before = [sum(process.cpu_times()[:2]) for process in processes]
    await asyncio.gather(*(client(request(rng, stream), begin + seconds) for _ in range(streams)))
    elapsed = time.perf_counter() - begin
    tokens = count[0] * OUTPUT
    cpu = [(sum(p.cpu_times()[:2]) - u) / elapsed for p, u in zip(processes, cpu_before)]
    if show:
        print(
            f"{streams:4d} streams: {count[0] / elapsed:7,.0f} requests/s {tokens / elapsed:9,.0f} tokens/s, "
            f"{tokens / count[1]:5.2f} tokens per event, {cpu[0] / tokens * elapsed * 1e6:5.1f} µs server CPU, "
            f"{cpu[1] / tokens * elapsed * 1e6:5.1f} µs core CPU per token; CPU {cpu[0]:4.0%} + {cpu[1]:4.0%}"
        )


class MeasuredServer:
    """A server started from a command line, and the CPU time of its processes.

    Args:
        name: Its name in the table.
        command: The command line, with `{model}` and `{port}`; may begin with variables.
    """

    def __init__(self, name: str, command: str, model: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = shlex.split(command.format(model=model, port=port))
        variables = {}
        while "=" in words[0]:
            key, _, variables[key] = words.pop(0).partition("=")
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder, env={**os.environ, **variables})

    def wait_ready(self, model: str) -> None:
        """Waits until it has answered a request."""
        body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(request, timeout=60).read()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not start:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of the process that serves HTTP, and of all its children together."""
        [own, *children] = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]
        return _cpu_seconds(own.pid), sum(_cpu_seconds(child.pid) for child in children)

    def num_steps(self) -> int:
        """Steps of the engine core that gave tokens, since its start."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=60).read().decode()
        return sum(
            int(float(n)) for n in re.findall(r"^\w+:iteration_tokens_total_count\S* (\S+)$", text, re.MULTILINE)
        )

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()


@dataclass
class Measurement:
    """One run: rates and times in seconds."""

    tokens: int
    duration: float
    mean_ttft: float
    p99_ttft: float
    p99_itl: float
    http_cpu: float
    core_cpu: float
    client_cpu: float
    num_steps: int


def compare(model: str, servers: list[str], rounds: int, counts: list[int], temperature: float | None) -> None:
    """Measures servers in turn, and prints a table."""
    from mvllm_bench.datasets import BenchmarkTokenizer, sample_requests

    tokenizer = BenchmarkTokenizer(model)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = []
        for name, _, command in (server.partition("=") for server in servers):
            started.append(MeasuredServer(name, command, model, Path(folder)))
            stack.callback(started[-1].end)
        for server in started:
            server.wait_ready(model)
        for count in counts:
            found: dict[str, list[Measurement]] = {server.name: [] for server in started}
            for number in range(rounds + 1):  # the first warms up
                samples = sample_requests(
                    "random", count, tokenizer=tokenizer, seed=number, input_len=PROMPT, output_len=OUTPUT
                )
                for server in started:
                    measured = measure(server, model, samples, temperature)
                    if number:
                        found[server.name].append(measured)
            print(f"\n{count} requests, at most {CONCURRENCY} at a time, medians of {rounds}")
            print(
                "| server | output tokens/s (all runs) | tokens per CPU second | mean / p99 TTFT ms | p99 ITL ms "
                "| µs a token: HTTP + core + client | core steps | tokens a step | core ms a step |"
            )
            print("|" + "---|" * 9)
            for name, runs in found.items():
                print(_row(name, runs))


def measure(server: MeasuredServer, model: str, samples: list, temperature: float | None) -> Measurement:
    """Sends all requests, at most CONCURRENCY at a time."""
    from mvllm.entrypoints.event_loop import run_in_event_loop
    from mvllm_bench.client import ServerEndpoint
    from mvllm_bench.metrics import calculate_metrics
    from mvllm_bench.server_benchmark import LoadPattern, run_benchmark

    extra = {} if temperature is None else {"temperature": temperature}
    target = ServerEndpoint(server.url, "/v1/completions", model, ignore_eos=True, extra_body=extra)
    steps, cpu, own = server.num_steps(), server.cpu_seconds(), time.process_time()
    run = run_in_event_loop(run_benchmark(target, samples, LoadPattern(max_concurrency=CONCURRENCY)))
    own = time.process_time() - own
    http_cpu, core_cpu = (after - before for after, before in zip(server.cpu_seconds(), cpu))
    result = calculate_metrics(run.results, run.duration)
    assert not result["failed"], next(each.error for each in run.results if each.error)
    assert result["total_output_tokens"] == len(samples) * OUTPUT
    return Measurement(
        result["total_output_tokens"], run.duration, result["mean_ttft_ms"], result["p99_ttft_ms"],
        result["p99_itl_ms"], http_cpu, core_cpu, own, server.num_steps() - steps
    )  # fmt: skip


def _row(name: str, runs: list[Measurement]) -> str:
    def median(value) -> float:
        return statistics.median(map(value, runs))

    rates = sorted(each.tokens / each.duration for each in runs)
    per_cpu = median(lambda each: each.tokens / (each.http_cpu + each.core_cpu + each.client_cpu))
    http, core, client = (
        median(lambda each, name=name: getattr(each, name) / each.tokens * 1e6)
        for name in ("http_cpu", "core_cpu", "client_cpu")
    )
    steps, step = median(lambda each: each.num_steps), median(lambda each: each.core_cpu / max(each.num_steps, 1) * 1e3)
    return (
        f"| {name} | {statistics.median(rates):,.0f} ({', '.join(f'{rate:,.0f}' for rate in rates)}) | {per_cpu:,.0f} "
        f"| {median(lambda each: each.mean_ttft):.0f} / {median(lambda each: each.p99_ttft):.0f} "
        f"| {median(lambda each: each.p99_itl):.0f} | {http:.1f} + {core:.1f} + {client:.1f} "
        f"| {steps:.0f} | {median(lambda each: each.tokens / max(each.num_steps, 1)):.0f} | {step:.2f} |"
    )


def _cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, from the kernel's scheduler, in nanoseconds."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            total += int(path.read_text().split()[0])
    return total / 1e9


if __name__ == "__main__":
    main()
