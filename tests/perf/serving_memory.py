"""Resident memory of serving a model, phase by phase: python tests/perf/serving_memory.py --model FOLDER

One process with engine and worker. The peak is VmHWM: all memory resident at the same time, including the clean pages
of libraries, which `file` counts. The requests fill the KV cache, so `beside` is neither weights nor cache.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PROMPT = 2048
CACHE_BYTES = 200_000_000


def fields() -> dict[str, int]:
    text = Path("/proc/self/status").read_text()
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}


def show(phase: str, beside: int) -> None:
    """Prints a line, and resets the peak."""
    found = fields()
    now, peak, anon, file = (found[name] / 1e6 for name in ("VmRSS", "VmHWM", "RssAnon", "RssFile"))
    rest = f"{peak - beside / 1e6:>9.0f}" if beside else " " * 9
    print(f"{phase:<28}{now:>9.0f}{peak:>9.0f}{anon:>9.0f}{file:>9.0f}{rest}", flush=True)
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", default=None)
    parser.add_argument("--no-tokenizer", action="store_true")
    args = parser.parse_args()
    weights = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    print(f"{'MB':<28}{'now':>9}{'peak':>9}{'anon':>9}{'file':>9}{'beside':>9}")
    show("interpreter", 0)
    from mvllm import LLM, SamplingParams

    settings = {"tokenizer": args.tokenizer or args.model, "skip_tokenizer_init": args.no_tokenizer}
    llm = LLM(args.model, kv_cache_memory_bytes=CACHE_BYTES, use_tqdm_on_load=False, **settings)
    cache = llm.llm_engine.cache_summary.total_bytes
    vocab = llm.llm_engine.model_config.vocab_size
    show("started", weights)

    def serve(phase: str, requests: int, tokens_in: int, tokens_out: int, temperature: float, beside: int) -> None:
        prompts = [{"prompt_token_ids": [(7 * i + j) % vocab for i in range(tokens_in)]} for j in range(requests)]
        params = SamplingParams(max_tokens=tokens_out, temperature=temperature, top_p=0.9, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        show(phase, beside)

    serve("first request", 1, 32, 8, 0.0, 0)
    serve(f"prompt of {PROMPT}", 1, PROMPT, 32, 0.0, 0)
    serve("32 requests, greedy", 32, 256, 64, 0.0, weights + cache)
    serve("32 requests, sampled", 32, 256, 64, 0.8, weights + cache)
    llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
