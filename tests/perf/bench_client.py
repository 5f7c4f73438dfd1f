"""Cost of the `mvllm bench serve` client per stream chunk, compared with httpx2.

python tests/perf/bench_client.py [--streams 256] [--tokens 200]

A server in a separate process writes one chunk to every stream in turn and does nothing else. The client therefore
limits the tokens per second, and its CPU time per chunk is its cost.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

from mvllm_bench.client import ServerEndpoint
from mvllm_bench.datasets import sample_requests
from mvllm_bench.server_benchmark import LoadPattern, run_benchmark

CHUNK = (
    b"data: "
    + json.dumps(
        {
            "id": "cmpl-0123456789abcdef",
            "object": "text_completion",
            "created": 1790000000,
            "model": "demo",
            "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
            "usage": None,
        }
    ).encode()
)
LAST = [
    CHUNK.replace(b'"finish_reason": null', b'"finish_reason": "length"') + b"\n\n",
    b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": %d}}\n\n',
    b"data: [DONE]\n\n",
]


def as_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_tokens: int) -> None:
    event, last = as_chunk(CHUNK + b"\n\n"), b"".join(as_chunk(e.replace(b"%d", b"%d" % num_tokens)) for e in LAST)
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length"))
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(num_tokens):
                writer.write(event)
                await asyncio.sleep(0)
                await writer.drain()
            writer.write(last + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(pipe: Connection, num_tokens: int) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: answer(r, w, num_tokens), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        async with server:
            await server.serve_forever()

    asyncio.run(run())


async def ours(url: str, streams: int) -> int:
    samples = sample_requests("builtin", streams, tokenizer=None, seed=0)
    outcome = await run_benchmark(ServerEndpoint(url, "/v1/completions", "m"), samples, LoadPattern())
    assert all(request.success for request in outcome.results), outcome.results[0].error
    return sum(len(request.itl) + 1 for request in outcome.results)


async def httpx_client(url: str, streams: int) -> int:
    import httpx2

    async def one(client: httpx2.AsyncClient) -> int:
        times = []
        async with client.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    json.loads(line[6:])
                    times.append(time.perf_counter())
        return len(times) - 1

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(streams))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, args.tokens), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{mine.recv()}"
    clients = {"mvllm bench serve": ours}
    if importlib.util.find_spec("httpx2"):
        clients["httpx2"] = httpx_client
    print(f"{'client':<20}{'streams':>9}{'tokens/s':>12}{'us of processor per token':>28}")
    for name, client in clients.items():
        for streams in args.streams:
            asyncio.run(client(url, streams))
            start, busy = time.perf_counter(), time.process_time()
            count = asyncio.run(client(url, streams))
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
            print(f"{name:<20}{streams:>9}{count / seconds:>12,.0f}{1e6 * busy / count:>28.1f}")
    server.terminate()


if __name__ == "__main__":
    main()
