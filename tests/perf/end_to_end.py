"""Output tokens per second and peak memory of mvllm and of transformers' `generate`: same model, prompts and threads.

    python tests/perf/end_to_end.py [--runs 3]

Greedy, end-of-text ignored, bf16, random token ids. The two engines run alternately, each in its own process. Prints
the median of each engine over the runs, and the ratio of the medians. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from perf_models import SHAPES, checkpoint

WORKLOADS = {
    1: {"requests": 1, "prompt": 32, "output": 128},
    16: {"requests": 16, "prompt": 128, "output": 64},
}
REPEATS = 3
KV_BYTES = 512 * 2**20


def prompts_of(batch: int, repeat: int) -> list[list[int]]:
    w = WORKLOADS[batch]
    rng = random.Random(f"{batch}-{repeat}")
    return [
        [rng.randrange(16, SHAPES["small"]["vocab_size"]) for _ in range(w["prompt"])] for _ in range(w["requests"])
    ]


def measure_mvllm(folder: Path, batches: list[int]) -> dict:
    from mvllm import LLM, SamplingParams

    start = time.perf_counter()
    with LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=KV_BYTES,
        max_model_len=2048,
    ) as llm:
        loaded, peak = time.perf_counter() - start, peak_rss()

        def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            return [r.outputs[0].token_ids for r in results]

        return timed(generate, batches) | {"load_seconds": loaded, "load_peak_bytes": peak}


def measure_transformers(folder: Path, batches: list[int]) -> dict:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    loaded, peak = time.perf_counter() - start, peak_rss()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        settings = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=None, pad_token_id=0)
        result = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return result[:, ids.shape[1] :].tolist()

    return timed(generate, batches) | {"load_seconds": loaded, "load_peak_bytes": peak}


def timed(generate, batches: list[int]) -> dict:
    rates = {}
    for batch in batches:
        output = WORKLOADS[batch]["output"]
        generate(prompts_of(batch, -1), 4)
        seconds = []
        for repeat in range(REPEATS):
            prompts = prompts_of(batch, repeat)
            start = time.perf_counter()
            tokens = generate(prompts, output)
            seconds.append(time.perf_counter() - start)
            assert all(len(t) == output for t in tokens)
        rates[batch] = batch * output / statistics.median(seconds)
    return {"tokens_per_second": rates}


def peak_rss() -> int:
    """This process's peak resident memory in bytes; getrusage would include the parent's memory at the fork."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def bare_rss() -> int:
    """Peak memory of a process that has only imported what both engines import."""
    code = "import torch, transformers.models.llama.modeling_llama; print(open('/proc/self/status').read())"
    status = subprocess.check_output([sys.executable, "-c", code], text=True)
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="processes per engine")
    parser.add_argument(
        "--batch", type=int, action="append", choices=sorted(WORKLOADS), help="batch sizes (default: all)"
    )
    parser.add_argument("--engine", choices=["mvllm", "transformers"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder, batches = checkpoint("small"), args.batch or sorted(WORKLOADS)
    if args.engine:
        measure = {"mvllm": measure_mvllm, "transformers": measure_transformers}[args.engine]
        print(json.dumps(measure(folder, batches)))
        return

    results: dict[str, list[dict]] = {"mvllm": [], "transformers": []}
    for _ in range(args.runs):
        for engine, found in results.items():
            command = [sys.executable, __file__, "--engine", engine, *(f"--batch={b}" for b in batches)]
            output = subprocess.run(
                command, check=True, capture_output=True, text=True, env=os.environ | {"MVLLM_LOGGING_LEVEL": "WARNING"}
            )
            found.append(json.loads(output.stdout.splitlines()[-1]))

    def median(engine: str, pick) -> float:
        return statistics.median(pick(r) for r in results[engine])

    print(f"{os.cpu_count()} cores, {args.runs} runs per engine, medians; Llama of 162 M parameters, bf16\n")
    print(f"{'batch':>5} {'in':>5} {'out':>5} {'mvllm tok/s':>12} {'transformers tok/s':>19} {'ratio':>6}")
    for batch in batches:
        rate = operator.itemgetter(str(batch))
        ours, theirs = (median(e, lambda r, rate=rate: rate(r["tokens_per_second"])) for e in ("mvllm", "transformers"))
        w = WORKLOADS[batch]
        print(f"{batch:>5} {w['prompt']:>5} {w['output']:>5} {ours:>12.1f} {theirs:>19.1f} {ours / theirs:>6.2f}")

    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    base = bare_rss()
    print(f"\nweights {weights / 2**20:.0f} MiB; bare interpreter with torch and transformers {base / 2**20:.0f} MiB")
    for engine in results:
        peak, load = median(engine, lambda r: r["load_peak_bytes"]), median(engine, lambda r: r["load_seconds"])
        print(
            f"{engine:>12}: loaded in {load:.1f} s, peak memory {peak / 2**20:.0f} MiB "
            f"= weights + {(peak - weights) / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
