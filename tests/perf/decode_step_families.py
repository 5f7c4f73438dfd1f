"""Milliseconds of a decode step of every native family, replayed and with each kernel called from Python.

    python -m tests.perf.decode_step_families [--batch 1 16] [--rounds 5] [--dtype bfloat16]

One checkpoint of the tests per model type: random weights and hidden sizes of about 64. So the time of a step is that
of calling its operations. Greedy, random token ids. Two engines in one process alternate, one with `enforce_eager`; the
result is the minimum over the rounds. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from functools import partial
from pathlib import Path

from mvllm import LLM
from tests.helpers.model_zoo import ZOO, make_checkpoint
from tests.perf.decode_step import step_seconds


def families() -> dict[str, str]:
    """The first checkpoint of each model type."""
    found: dict[str, str] = {}
    for name, entry in ZOO.items():
        found.setdefault(entry.config().model_type, name)
    return found


_step_seconds = partial(step_seconds, steps=48, prompt=8, vocab_size=256)


def measure(folder: Path, dtype: str, batches: list[int], rounds: int) -> list[tuple[float, float]]:
    """Milliseconds with and without replay, for each batch size."""
    settings = {
        "model": str(folder),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 16 << 20,
        "max_model_len": 64,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
    }
    rng, results = random.Random(7), []
    with LLM(**settings) as replaying, LLM(**settings, enforce_eager=True) as eager:
        for batch in batches:
            for llm in (replaying, eager):
                _step_seconds(llm, batch, rng)  # records the step
            times = [(_step_seconds(replaying, batch, rng), _step_seconds(eager, batch, rng)) for _ in range(rounds)]
            results.append((1e3 * min(a for a, _ in times), 1e3 * min(b for _, b in times)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    columns = " | ".join(f"{batch}: replayed, ms | eager, ms | ratio" for batch in args.batch)
    print(f"| model type | {columns} |\n|---{'|---' * 3 * len(args.batch)}|")
    for model_type, name in families().items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = make_checkpoint(name, Path(folder), tokenizer=False)
            found = measure(checkpoint, args.dtype, args.batch, args.rounds)
        cells = " | ".join(f"{replay:.3f} | {eager:.3f} | {eager / replay:.2f}" for replay, eager in found)
        print(f"| {model_type} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
