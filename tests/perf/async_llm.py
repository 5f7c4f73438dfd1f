"""Throughput of AsyncLLM on a platform that computes nothing: requests and tokens per second per concurrency.

    python tests/perf/async_llm.py [--streams 1 64 256] [--seconds 4] [--kind delta|cumulative|final] [--profile]

Each of `--streams` concurrent callers sends one request after the other: 32 prompt tokens, 64 output tokens,
detokenized with the demo model's tokenizer. Prints the rates, the mean number of tokens per output, and the CPU use of
the front-end and engine-core processes; then the rates of the same number of tokens through `LLM`, with the engine core
in the same process and in its own process. `--profile` prints the front end's functions by own time. mvllm-null-device
must be installed or on PYTHONPATH with metadata; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.helpers.plugins import null_platform_path

PROMPT, OUTPUT = 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--kind", choices=("delta", "cumulative", "final"), default="delta")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--offline", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.path[:0] = null_platform_path(Path(folder))
        online(args)
        if args.offline:
            for own_process in (False, True):
                offline(own_process)


SETTINGS = {
    "model": "demo",
    "platform": "null",
    "load_format": "dummy",
    "kv_cache_memory_bytes": 2**28,
    "max_num_batched_tokens": 8192,
}


def prompts(count: int) -> list[dict[str, list[int]]]:
    rng = random.Random(0)
    return [{"prompt_token_ids": [rng.randrange(16, 500) for _ in range(PROMPT)]} for _ in range(count)]


def online(args: argparse.Namespace) -> None:
    from mvllm import SamplingParams
    from mvllm.config.engine_args import EngineArgs
    from mvllm.engine.async_llm import AsyncLLM
    from mvllm.messages.sampling_params import RequestOutputKind

    kinds = {"delta": "DELTA", "cumulative": "CUMULATIVE", "final": "FINAL_ONLY"}
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT, ignore_eos=True, output_kind=RequestOutputKind[kinds[args.kind]]
    )
    engine = AsyncLLM.from_engine_args(EngineArgs.from_kwargs(**SETTINGS), log_stats=False)
    front, core = psutil.Process(), psutil.Process(engine.core_pids[0])

    async def caller(prompt: dict[str, list[int]], until: float, count: list[int]) -> None:
        while time.perf_counter() < until:
            async for output in engine.generate(prompt, params):
                count[1] += 1
                count[0] += output.finished

    async def load(streams: int, seconds: float) -> None:
        count = [0, 0]
        begin = time.perf_counter()
        used = [sum(process.cpu_times()[:2]) for process in (front, core)]
        await asyncio.gather(*(caller(prompt, begin + seconds, count) for prompt in prompts(streams)))
        took = time.perf_counter() - begin
        share = [(sum(p.cpu_times()[:2]) - u) / took for p, u in zip((front, core), used)]
        requests, outputs = count
        tokens = requests * OUTPUT
        print(
            f"{streams:4d} streams: {requests / took:7,.0f} requests/s {tokens / took:9,.0f} tokens/s, "
            f"{tokens / outputs:5.2f} tokens an output, {share[0] / tokens * took * 1e6:5.1f} µs of front end and "
            f"{share[1] / tokens * took * 1e6:5.1f} µs of core a token; processor {share[0]:4.0%} + {share[1]:4.0%}"
        )

    async def run() -> None:
        await load(64, 0.5)
        for streams in args.streams:
            if args.profile:
                with cProfile.Profile() as profile:
                    await load(streams, args.seconds)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            else:
                await load(streams, args.seconds)

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()


def offline(own_process: bool) -> None:
    from mvllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(**SETTINGS, engine_core_process=own_process) as llm:
        llm.generate(prompts(8), params, use_tqdm=False)
        begin = time.perf_counter()
        outputs = llm.generate(prompts(2048), params, use_tqdm=False)
        took = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        where = "in a process of its own" if own_process else "in the caller's process"
        print(f"offline, engine core {where}: {tokens / took:,.0f} tokens/s")


if __name__ == "__main__":
    main()
