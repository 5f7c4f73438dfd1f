"""A start from nothing to the first token, phase by phase, and the peak memory of it: python tests/perf/cold_start.py

Each start is a program of its own; the forms take turns, and the one with the median total is shown. `interpreter` is
what passes between the launch of the program and its first line, `import` the import of mvllm's front end; the phases
are those of the log (`Started in ...`), the first token is counted from its request. Phases may overlap, which makes
`other` negative.

The peak counts everything that the process that holds the weights ever had in memory at once, less the weights: the
interpreter, torch, the step that sizes the KV cache, and what of the KV cache was used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from perf_models import checkpoint

FORMS: dict[str, dict[str, Any]] = {
    "uni": {},
    "own process": {"engine_core_process": True},
    "two workers": {"tensor_parallel_size": 2},
}

_PROGRAM = """
import time
begun = time.time()
import json, os, re, sys
from pathlib import Path
launched, folder, settings = float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
from mvllm import LLM, SamplingParams
import mvllm.engine.llm_engine
imported = time.time()
llm = LLM(folder, use_tqdm_on_load=False, **settings)
started = time.time()
llm.generate({"prompt_token_ids": list(range(5, 37))}, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
done = time.time()
batch, sampled = [{"prompt_token_ids": list(range(5, 133))}] * 32, SamplingParams(max_tokens=8, ignore_eos=True)
llm.generate(batch, sampled, use_tqdm=False)

def peak(pid):
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024

core = llm.llm_engine._client
pid = core.core_pid if hasattr(core, "core_pid") else os.getpid()
phases = {"interpreter": begun - launched, "import": imported - begun, **llm.llm_engine.start_seconds}
phases["other"] = done - launched - sum(phases.values())
weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
print(json.dumps({"total": done - launched, "phases": phases, "extra": peak(pid) - weights, "weights": weights}))
llm.close()
"""


def start(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the launch to the first token, by phase; and bytes."""
    env = dict(os.environ, MVLLM_LOGGING_LEVEL="WARNING")
    command = [sys.executable, "-c", _PROGRAM, str(time.time()), str(folder), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small", help="a name of perf_models.py or a folder")
    parser.add_argument("--tokenizer", default=None, help="default: the demo model's")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, nargs="+", default=["uni", "own process"])
    args = parser.parse_args()
    import mvllm

    folder = Path(args.model) if Path(args.model).is_dir() else checkpoint(args.model)
    tokenizer = args.tokenizer or str(Path(mvllm.__file__).parent / "demo" / "model")
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in args.form}
    for _ in range(args.runs):
        for form in args.form:
            found[form].append(start(folder, {"tokenizer": tokenizer, **FORMS[form]}))
    for form, runs in found.items():
        run = sorted(runs, key=lambda each: each["total"])[len(runs) // 2]
        print(f"{form}: {run['total']:.2f} s from nothing to the first token")
        for name, seconds in run["phases"].items():
            print(f"    {name:<20} {seconds:>6.2f}")
        if form != "two workers":
            print(f"    peak memory: weights ({run['weights'] / 1e6:.0f} MB) + {run['extra'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
