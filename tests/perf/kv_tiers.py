"""KV tiers on this machine: python -m tests.perf.kv_tiers [restart] [swap] [--model small] [--prefix 2048] ...

restart   Time to the first token of a prompt: computed by a new engine, and by a new engine that finds all of it but
          the last tokens in a disk cache which an engine before it has written. The minimum of several starts.
swap      Long prompts in a KV cache that holds a part of them, so that requests are preempted: output tokens per second
          and the 99th percentile of the time between two tokens of a request, for both preemption modes. The runs of
          both modes alternate.

Tokens must be equal. An idle machine is needed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from mvllm import LLM, SamplingParams
from tests.perf.perf_models import SHAPES, checkpoint


def make_engine(model: Path, **settings: Any) -> LLM:
    """An engine on random weights, without a tokenizer."""
    return LLM(model=str(model), platform="cpu", skip_tokenizer_init=True, **settings)


def prompts_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    dice = random.Random(seed)
    return [[dice.randrange(5, 2000) for _ in range(length)] for _ in range(count)]


def time_to_first_token(model: Path, prompt: list[int], settings: dict[str, Any]) -> tuple[float, list[int], int]:
    """Seconds to the first token of a new engine, its first tokens, and the prompt tokens that it has found."""
    llm = make_engine(model, **settings)
    try:
        warm_up = [{"prompt_token_ids": [9] * 40}]
        llm.generate(warm_up, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        started = time.perf_counter()
        [first] = llm.generate(
            [{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False
        )
        seconds = time.perf_counter() - started
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [more] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return seconds, list(more.outputs[0].token_ids), first.num_cached_tokens or 0
    finally:
        llm.close()


def measure_restart(model: Path, args: argparse.Namespace) -> None:
    """Prints the times of part `restart`."""
    [prompt] = prompts_of(1, args.prefix + 8)
    settings = {"max_model_len": args.prefix + 64, "kv_cache_memory_bytes": args.memory << 20}
    folder = Path(tempfile.mkdtemp(prefix="mvllm-kv-tiers-"))
    computed, found = [], []
    try:
        stored = {**settings, "kv_disk_cache": str(folder), "kv_disk_cache_size": 4}
        _, expected, _ = time_to_first_token(model, prompt, stored)  # writes the files
        for _ in range(args.rounds):
            seconds, tokens, cached = time_to_first_token(model, prompt, settings)
            assert tokens == expected and not cached
            computed.append(seconds)
            seconds, tokens, cached = time_to_first_token(model, prompt, stored)
            assert tokens == expected and cached >= args.prefix - 32, f"only {cached} tokens were found"
            found.append(seconds)
        size = sum(file.stat().st_size for file in folder.rglob("*.kv"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratio = min(found) / min(computed)
    print(
        f"restart: prefix of {args.prefix} tokens: computed {min(computed) * 1e3:.1f} ms, found on disk "
        f"{min(found) * 1e3:.1f} ms ({ratio:.3f} x), {size / 2**20:.1f} MiB of files; tokens equal"
    )


def run_under_pressure(model: Path, mode: str, args: argparse.Namespace) -> tuple[float, float, int, list[list[int]]]:
    """Output tokens per second, p99 between tokens in seconds, preemptions, and the tokens."""
    prompts = prompts_of(args.requests, args.long, seed=1)
    settings: dict[str, Any] = {
        "max_model_len": args.long + args.output + 16,
        "kv_cache_memory_bytes": args.pressure << 20,
        "max_num_seqs": args.requests,
        "preemption_mode": mode,
        "kv_offloading_size": args.host,
    }
    llm = make_engine(model, **settings)
    engine = llm.llm_engine
    try:
        params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, params)
        tokens: dict[str, list[int]] = {}
        last: dict[str, float] = {}
        gaps: list[float] = []
        started = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                now, ids = time.perf_counter(), list(output.outputs[0].token_ids)
                if len(ids) > len(tokens.get(output.request_id, ())):
                    if output.request_id in last:
                        gaps.append(now - last[output.request_id])
                    last[output.request_id], tokens[output.request_id] = now, ids
        seconds = time.perf_counter() - started
        preemptions = engine.stats.num_preemptions if engine.stats else 0
    finally:
        llm.close()
    gaps.sort()
    count = sum(map(len, tokens.values()))
    ordered = [tokens[f"r{i}"] for i in range(len(prompts))]
    return count / seconds, gaps[len(gaps) * 99 // 100] if gaps else 0.0, preemptions, ordered


def measure_swap(model: Path, args: argparse.Namespace) -> None:
    """Prints the times of part `swap`."""
    best: dict[str, tuple[float, float, int]] = {}
    expected: list[list[int]] | None = None
    for _ in range(args.rounds):
        for mode in ("recompute", "swap"):
            rate, p99, preemptions, tokens = run_under_pressure(model, mode, args)
            assert expected is None or tokens == expected, "the modes give different tokens"
            expected = tokens
            if mode not in best or rate > best[mode][0]:
                best[mode] = rate, p99, preemptions
    for mode, (rate, p99, preemptions) in best.items():
        print(
            f"{mode:9}: {args.requests} prompts of {args.long} tokens, {args.output} output tokens each: {rate:.1f} "
            f"output tokens/s, p99 between tokens {p99 * 1e3:.1f} ms, {preemptions} preemptions"
        )
    print(f"swap / recompute: {best['swap'][0] / best['recompute'][0]:.2f} x; tokens equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="restart, swap; both by default")
    parser.add_argument("--model", default="small", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of the prefix of part restart")
    parser.add_argument("--memory", type=int, default=512, help="MiB of KV cache of part restart")
    parser.add_argument("--requests", type=int, default=8, help="requests of part swap")
    parser.add_argument("--long", type=int, default=1536, help="prompt tokens of each")
    parser.add_argument("--output", type=int, default=256, help="output tokens of each")
    parser.add_argument("--pressure", type=int, default=232, help="MiB of KV cache of part swap")
    parser.add_argument("--host", type=float, default=2.0, help="GiB of host memory of part swap")
    args = parser.parse_args()
    model = checkpoint(args.model)
    if not args.parts or "restart" in args.parts:
        measure_restart(model, args)
    if not args.parts or "swap" in args.parts:
        measure_swap(model, args)


if __name__ == "__main__":
    main()
