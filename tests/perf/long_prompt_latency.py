"""Latency of chats beside a prompt of 100,000 tokens, with real processes: python -m tests.perf.long_prompt_latency

AsyncLLM with its engine core in a process of its own. The device is the null device with steps that take 8 ms + 30 us
a token (`--device MS,US` for another). 64 chats of 50 to 600 prompt tokens and 100 to 300 output tokens are always
there; after some seconds the long prompt arrives. Prints the 99th percentile and the mean of the time between two
outputs of a chat before the long prompt and until its first token, and the time to that token, for a program's settings
and for a server's. `--steady`: no new chats arrive. Run it on an idle machine: client and core share its processor.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mvllm import SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_settings import SERVER_LONG_PREFILL_SLOWDOWN
from mvllm.engine.async_llm import AsyncLLM
from mvllm.messages.sampling_params import RequestOutputKind
from tests.helpers.plugins import timed_platform_path

SETTINGS: dict[str, Any] = {
    "model": "demo",
    "platform": "timed",
    "load_format": "dummy",
    "hf_overrides": {"max_position_embeddings": 131_072},
    "kv_cache_memory_bytes": 1 << 20,  # one byte a token
    "max_num_batched_tokens": 2048,
}


class Chats:
    """Chats that are always there; the times between their outputs are recorded."""

    def __init__(self, engine: AsyncLLM, *, steady: bool) -> None:
        self._engine, self._steady = engine, steady
        self._rng = random.Random(1)
        self.gaps: list[float] = []

    async def run(self) -> None:
        while True:
            length = 20_000 if self._steady else self._rng.randint(100, 300)
            last = 0.0
            async for _ in self._engine.generate(self._prompt(self._rng.randint(50, 600)), params(length)):
                now = time.perf_counter()
                if last:
                    self.gaps.append(now - last)
                last = now

    async def time_to_first_token(self, length: int) -> float:
        start = time.perf_counter()
        async for _ in self._engine.generate(self._prompt(length), params(1)):
            pass
        return time.perf_counter() - start

    def _prompt(self, length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [self._rng.randrange(16, 500) for _ in range(length)]}


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )


async def measure(name: str, args: argparse.Namespace, limits: dict[str, float]) -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs.from_kwargs(**SETTINGS, **limits), log_stats=False)
    chats = Chats(engine, steady=args.steady)
    tasks = [asyncio.create_task(chats.run()) for _ in range(args.chats)]
    try:
        await asyncio.sleep(args.warm_up)
        chats.gaps.clear()
        await asyncio.sleep(args.seconds)
        alone = sorted(chats.gaps)
        chats.gaps.clear()
        first_token = await chats.time_to_first_token(args.long)
        beside = sorted(chats.gaps)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.shutdown()
    p99 = [each[len(each) * 99 // 100] * 1e3 for each in (alone, beside)]
    mean = [sum(each) / len(each) * 1e3 for each in (alone, beside)]
    print(
        f"{name:12}{p99[0]:8.1f}{p99[1]:8.1f} ms {p99[1] / p99[0]:5.2f}{mean[0]:12.1f}{mean[1]:8.1f} ms "
        f"{mean[1] / mean[0]:5.2f}{first_token:12.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="8,30", help="milliseconds of a step, microseconds of a token")
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of the measurement without the long prompt")
    parser.add_argument("--steady", action="store_true")
    args = parser.parse_args()
    os.environ["TIMED_DEVICE"] = args.device
    with tempfile.TemporaryDirectory() as folder:
        sys.path[:0] = timed_platform_path(Path(folder))
        print(f"{'settings of':12}{'p99 alone, beside, ratio':>25}{'mean alone, beside, ratio':>29}{'long prompt':>15}")
        asyncio.run(measure("a program", args, {}))
        asyncio.run(measure("a server", args, {"long_prefill_slowdown": SERVER_LONG_PREFILL_SLOWDOWN}))


if __name__ == "__main__":
    main()
