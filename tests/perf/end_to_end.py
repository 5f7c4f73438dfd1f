"""Output tokens per second and peak memory of mvllm and of transformers' `generate`: same model, prompts and threads.

    python tests/perf/end_to_end.py [--runs 3]

Greedy, end-of-text ignored, bf16, random token ids. The two engines run alternately, each in its own process. Prints
the median of each engine over the runs, and the ratio of the medians. Run it on an idle machine.

With another environment's Python, such as that of a checkout of another commit, its mvllm takes transformers' place:

    python tests/perf/end_to_end.py --python OTHER/.venv/bin/python [--work single prompt] [--model FILE] [--runs 9]

Each run is a pair of processes, and every second pair begins with the other environment. The ratio is the median of
the pairs' ratios, seconds of the other over seconds of this one: below 1, this one is slower.
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
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2]))
from perf_models import SHAPES, checkpoint

WORKLOADS = {
    "single": {"requests": 1, "prompt": 32, "output": 128},
    "batch": {"requests": 16, "prompt": 128, "output": 64},
    "offline": {"requests": 32, "prompt": 256, "output": 64},
    "prompt": {"requests": 1, "prompt": 2048, "output": 1},
}
REPEATS = 3
KV_BYTES = 512 * 2**20


def prompts_of(work: str, repeat: int) -> list[list[int]]:
    w = WORKLOADS[work]
    rng = random.Random(f"{work}-{repeat}")
    return [
        [rng.randrange(16, SHAPES["small"]["vocab_size"]) for _ in range(w["prompt"])] for _ in range(w["requests"])
    ]


def measure_mvllm(model: str, works: list[str], settings: dict[str, str]) -> dict:
    import mvllm
    from mvllm import LLM, SamplingParams

    start = time.perf_counter()
    with LLM(
        model=model,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=KV_BYTES,
        max_model_len=4096,
        **settings,
    ) as llm:
        loaded, peak = time.perf_counter() - start, peak_rss()

        def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            return [r.outputs[0].token_ids for r in results]

        found = timed(generate, works) | {"load_seconds": loaded, "load_peak_bytes": peak}
        return found | {"package": str(Path(mvllm.__file__).parent)}


def measure_transformers(model: str, works: list[str], settings: dict[str, str]) -> dict:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    start = time.perf_counter()
    module = AutoModelForCausalLM.from_pretrained(model, dtype=settings["dtype"]).eval()
    loaded, peak = time.perf_counter() - start, peak_rss()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        greedy = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=None, pad_token_id=0)
        result = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        return result[:, ids.shape[1] :].tolist()

    return timed(generate, works) | {"load_seconds": loaded, "load_peak_bytes": peak}


def timed(generate, works: list[str]) -> dict:
    """Median seconds of each workload."""
    medians = {}
    for work in works:
        output = WORKLOADS[work]["output"]
        generate(prompts_of(work, -1), min(output, 4))
        seconds = []
        for repeat in range(REPEATS):
            prompts = prompts_of(work, repeat)
            start = time.perf_counter()
            tokens = generate(prompts, output)
            seconds.append(time.perf_counter() - start)
            assert all(len(t) == output for t in tokens)
        medians[work] = statistics.median(seconds)
    return {"seconds": medians}


def peak_rss() -> int:
    """This process's peak resident memory in bytes; getrusage would include the parent's memory at the fork."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def bare_rss() -> int:
    """Peak memory of a process that has only imported what both engines import."""
    code = "import torch, transformers.models.llama.modeling_llama; print(open('/proc/self/status').read())"
    status = subprocess.check_output([sys.executable, "-c", code], text=True)
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def run_alternately(commands: dict[str, list[str]], runs: int, idle_limit: float) -> tuple[dict[str, list[dict]], bool]:
    """What each command printed in each run, and whether the machine was idle before all of them.

    Every second run is in the reverse order.
    """
    from tests.perf.cpu_bench.machine import wait_until_idle

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["MVLLM_LOGGING_LEVEL"] = "WARNING"
    results: dict[str, list[dict]] = {name: [] for name in commands}
    all_idle = True
    for run in range(runs):
        for name in list(commands)[:: -1 if run % 2 else 1]:
            all_idle &= wait_until_idle(idle_limit)
            done = subprocess.run(commands[name], stdout=subprocess.PIPE, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"error: {name} ended with status {done.returncode}; its output is above")
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
    return results, all_idle


def print_pairs(this: list[dict], other: list[dict], works: list[str]) -> None:
    """Medians of two environments, and the median of the ratios of their pairs."""
    print(f"this   {this[0]['package']}\nother  {other[0]['package']}\n")
    print(f"{'work':>8} {'this s':>9} {'other s':>9} {'other / this':>13} {'of pairs':>12}")
    for work in works:
        seconds = [[run["seconds"][work] for run in runs] for runs in (this, other)]
        ratios = [theirs / ours for ours, theirs in zip(*seconds, strict=True)]
        ours, theirs = (statistics.median(each) for each in seconds)
        spread = f"{min(ratios):.3f}-{max(ratios):.3f}"
        print(f"{work:>8} {ours:>9.4f} {theirs:>9.4f} {statistics.median(ratios):>13.3f} {spread:>12}")


def print_engines(results: dict[str, list[dict]], works: list[str], folder: Path) -> None:
    """Medians of mvllm and transformers, and the memory of loading."""

    def median(engine: str, pick: Callable[[dict], float]) -> float:
        return statistics.median(pick(run) for run in results[engine])

    print(
        f"{'work':>8} {'requests':>8} {'in':>5} {'out':>5} {'mvllm tok/s':>12} {'transformers tok/s':>19} {'ratio':>6}"
    )
    for work in works:
        w = WORKLOADS[work]
        tokens = w["requests"] * w["output"]
        ours, theirs = (tokens / median(e, lambda run, work=work: run["seconds"][work]) for e in results)
        sizes = f"{work:>8} {w['requests']:>8} {w['prompt']:>5} {w['output']:>5}"
        print(f"{sizes} {ours:>12.1f} {theirs:>19.1f} {ours / theirs:>6.2f}")

    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    base = bare_rss()
    print(f"\nweights {weights / 2**20:.0f} MiB; bare interpreter with torch and transformers {base / 2**20:.0f} MiB")
    for engine in results:
        peak, load = (median(engine, operator.itemgetter(key)) for key in ("load_peak_bytes", "load_seconds"))
        print(
            f"{engine:>12}: loaded in {load:.1f} s, peak memory {peak / 2**20:.0f} MiB "
            f"= weights + {(peak - weights) / 2**20:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="processes per engine")
    parser.add_argument("--work", nargs="+", choices=WORKLOADS, default=["single", "batch"])
    parser.add_argument("--python", type=Path, help="the Python of another environment with mvllm")
    parser.add_argument(
        "--model", default="small", help="a folder, a name of perf_models.py; with --python a GGUF file"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="of mvllm, with --python")
    parser.add_argument("--idle-limit", type=float, default=60.0, help="seconds to wait for an idle machine (60)")
    parser.add_argument("--engine", choices=["mvllm", "transformers"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quantization and not (args.python or args.engine):
        parser.error("--quantization needs --python: transformers runs the model as it is")
    model = str(checkpoint(args.model)) if args.model in SHAPES else args.model
    settings = {"dtype": args.dtype} | ({"quantization": args.quantization} if args.quantization else {})
    if args.engine:
        measure = {"mvllm": measure_mvllm, "transformers": measure_transformers}[args.engine]
        print(json.dumps(measure(model, args.work, settings)))
        return
    more = ["--model", model, *(f"--{name}={value}" for name, value in settings.items()), "--work", *args.work]
    if args.python:
        pythons = {"this": sys.executable, "other": str(args.python)}
        commands = {name: [python, __file__, "--engine", "mvllm", *more] for name, python in pythons.items()}
    else:
        commands = {name: [sys.executable, __file__, "--engine", name, *more] for name in ("mvllm", "transformers")}
    results, idle = run_alternately(commands, args.runs, args.idle_limit)
    print(f"{os.cpu_count()} cores, {args.runs} runs per engine, medians; {model}, {', '.join(settings.values())}\n")
    if args.python:
        print_pairs(results["this"], results["other"], args.work)
    else:
        print_engines(results, args.work, Path(model))
    if not idle:
        print("\nthe machine was not idle")


if __name__ == "__main__":
    main()
