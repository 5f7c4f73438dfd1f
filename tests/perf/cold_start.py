"""Time of a cold start to the first token, by phase, and its peak memory: python tests/perf/cold_start.py

Each start is a new process. The configurations alternate; the start with the median total is shown. `interpreter` is
the time from the launch of the program to its first line, `import` the import of mvllm's front end; the phases are
those of the log (`Started in ...`), and the first token is timed from its request. Phases may overlap, which makes
`other` negative. Each phase is printed with its share of the total: on a busy machine the shares are more reliable than
the seconds.

`--model smollm2` and `--model gemma3` are the shapes of SmolLM2-135M and Gemma 3 270M with random weights:

    python tests/perf/cold_start.py --model smollm2 --dtype float32 --form uni

The peak is the largest resident memory of the process that holds the weights, minus the weights. It includes the
interpreter, torch, the step that sizes the KV cache, and the used part of the KV cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perf_models import checkpoint

FORMS: dict[str, dict[str, Any]] = {
    "uni": {},
    "own process": {"engine_core_process": True},
    "two workers": {"tensor_parallel_size": 2},
}

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
"""Models whose weights are drawn at each start (`load_format=dummy`)."""

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
    """Seconds from the launch to the first token, by phase, and bytes of memory."""
    env = dict(os.environ, MVLLM_LOGGING_LEVEL="WARNING")
    command = [sys.executable, "-c", _PROGRAM, str(time.time()), str(folder), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_shape(name: str) -> Path:
    """Creates a folder with the config of one of SHAPES."""
    folder = Path(tempfile.gettempdir()) / "mvllm-bench-shapes" / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 0, **SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small", help="a name of perf_models.py, one of SHAPES, or a folder")
    parser.add_argument("--tokenizer", default=None, help="default: the demo model's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, nargs="+", default=["uni", "own process"])
    args = parser.parse_args()
    import mvllm

    common: dict[str, Any] = {"dtype": args.dtype}
    if args.model in SHAPES:
        folder, common["load_format"] = write_shape(args.model), "dummy"
    else:
        folder = Path(args.model) if Path(args.model).is_dir() else checkpoint(args.model)
    tokenizer = args.tokenizer or str(Path(mvllm.__file__).parent / "demo" / "model")
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in args.form}
    for _ in range(args.runs):
        for form in args.form:
            found[form].append(start(folder, {"tokenizer": tokenizer, **common, **FORMS[form]}))
    for form, runs in found.items():
        run = sorted(runs, key=lambda each: each["total"])[len(runs) // 2]
        print(f"{form}: {run['total']:.2f} s from nothing to the first token")
        for name, seconds in run["phases"].items():
            print(f"    {name:<20} {seconds:>6.2f} {seconds / run['total']:>5.0%}")
        if form != "two workers" and args.model not in SHAPES:
            print(f"    peak memory: weights ({run['weights'] / 1e6:.0f} MB) + {run['extra'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
