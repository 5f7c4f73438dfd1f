"""Milliseconds of a decode step with and without replay, compared with the time to read the weights.

    python tests/perf/decode_step.py [--batch 1 16 32] [--rounds 3] [--dtypes bfloat16 float16 float32]

Llama of 162 M parameters, greedy, random token ids. Two engines in one process alternate, one with
`enforce_eager`; the result is the minimum over the rounds. The floor is the bytes of the weights that a step reads
divided by the read bandwidth, which is measured between the rounds with huge pages and as many threads. Run it on an
idle machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from perf_models import SHAPES, checkpoint

from mvllm import LLM, SamplingParams
from mvllm_cpu.memory import zeros

STEPS = 16
PROMPT = 32
BUFFER_BYTES = 160 << 20


def weight_bytes(dtype: str) -> int:
    """Bytes of the weights that one step reads: all except the embedding."""
    shape = SHAPES["small"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    return getattr(torch, dtype).itemsize * (
        shape["num_hidden_layers"] * (4 * hidden**2 + 3 * hidden * inner) + shape["vocab_size"] * hidden
    )


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes per second at which all threads together read a buffer, the best of five."""
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        buffer.sum()
        best = max(best, buffer.nbytes / (time.perf_counter() - start))
    return best


def step_seconds(
    llm: LLM, batch: int, rng: random.Random, *, steps: int = STEPS, prompt: int = PROMPT, vocab_size: int = 32000
) -> float:
    """Seconds per step: the difference of a long and a short run over the same number of requests."""
    seconds = []
    for output in (1, 1 + steps):
        prompts = [{"prompt_token_ids": [rng.randrange(16, vocab_size) for _ in range(prompt)]} for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / steps


def measure(dtype: str, batches: list[int], rounds: int) -> None:
    """Prints the lines of one dtype."""
    settings = {
        "model": str(checkpoint("small")),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 1024,
        "max_num_seqs": max(batches),
    }
    buffer = zeros((BUFFER_BYTES // 4,), torch.float32).fill_(1)
    rng = random.Random(7)
    with LLM(**settings) as replaying, LLM(**settings, enforce_eager=True) as eager:
        for batch in batches:
            for llm in (replaying, eager):
                step_seconds(llm, batch, rng)  # records the step
            best, bandwidth = {replaying: 1e9, eager: 1e9}, 0.0
            for _ in range(rounds):
                for llm in best:
                    best[llm] = min(best[llm], step_seconds(llm, batch, rng))
                bandwidth = max(bandwidth, read_bandwidth(buffer))
            floor = weight_bytes(dtype) / bandwidth
            print(
                f"{dtype:>8} {batch:>5} {best[replaying] * 1e3:>10.3f} {best[eager] * 1e3:>9.3f} {floor * 1e3:>9.3f} "
                f"{floor / best[replaying]:>15.2f} {bandwidth / 1e9:>10.1f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    args = parser.parse_args()
    print(
        f"{'dtype':>8} {'batch':>5} {'replay ms':>10} {'eager ms':>9} {'floor ms':>9} {'floor / replay':>15} "
        f"{'read GB/s':>10}"
    )
    for dtype in args.dtypes:
        measure(dtype, args.batch, args.rounds)


if __name__ == "__main__":
    main()
