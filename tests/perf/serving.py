"""Benchmark of the HTTP server: throughput and CPU use on the null platform, which computes nothing.

    python tests/perf/serving.py [--streams 1 64 256] [--seconds 4] [--whole]

Starts a server process. Each stream is a client in this process that sends one request at a time over a persistent
connection: 32 prompt tokens, 64 output tokens, one server-sent event per token (`--whole`: one response without
streaming). Prints requests/s, tokens/s, tokens per event, and the CPU use of the server and engine core processes.
Requires mvllm-null-device, installed or on PYTHONPATH with its metadata. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.plugins import null_platform_path  # noqa: E402
from tests.helpers.server import ServerProcess  # noqa: E402

PROMPT, OUTPUT = 32, 64
SETTINGS = ("--platform", "null", "--load-format", "dummy", "--kv-cache-memory-bytes", str(2**28),
            "--max-num-batched-tokens", "8192", "--no-access-log")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
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
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
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


if __name__ == "__main__":
    main()
