"""Time to the first token of a prompt with an image, beside transformers and llama.cpp (mtmd):

    python -m tests.perf.images_first_token [--peers FOLDER] [--images 12] [--rounds 3] [--breakdown] [--enforce-eager]

Every engine gets the same pictures, which it has not seen before, each in a prompt of 32 text tokens, one at a time:
decoding of the file, preprocessing, vision tower, projector, prompt and the first token. The model is LLaVA: a CLIP
tower of 11 layers of width 768 on 224 x 224 pixels in patches of 16, 196 embeddings, and the language model S of `bench
cpu`, in bfloat16 with random weights. `--peers` is the folder in which `bench cpu` finds llama.cpp. The engines take
turns; the medians of all pictures of all rounds are compared. An idle machine is needed. `--breakdown` prints what the
parts of mvllm take instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.perf.cpu_bench.models import gguf_model, hf_model
from tests.perf.images_first_token.checkpoint import llava_checkpoint, projector_file, write_pictures

HERE = Path(__file__).parent
OURS = "mvllm"


def output_of(command: Sequence[str | Path], pictures: Sequence[Path]) -> list[str]:
    """The lines that a runner prints: the last one is the seconds of each picture as JSON."""
    names = [str(picture) for picture in pictures]
    done = subprocess.run([*map(str, command), *names], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    return done.stdout.strip().splitlines()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder of the other engines; without it, transformers alone")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "mvllm-bench-models")
    parser.add_argument("--images", type=int, default=12, help="pictures of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--breakdown", action="store_true", help="what the parts of mvllm take; no other engine runs")
    parser.add_argument("--enforce-eager", action="store_true", help="mvllm records neither towers nor steps")
    args = parser.parse_args()

    folder = llava_checkpoint(args.models, hf_model(args.models, "S"))
    settings, eager = ["--threads", str(args.threads)], ["--enforce-eager"] * args.enforce_eager
    runners: dict[str, Callable[[], list[str | Path]]] = {
        OURS: lambda: [sys.executable, "-m", f"{__package__}.run_mvllm", folder, *settings, *eager],
        "transformers": lambda: [sys.executable, HERE / "run_transformers.py", folder, *settings],
    }
    if args.breakdown:
        pictures = write_pictures(args.models / "pictures", args.images, seed=0)
        print(*output_of([*runners[OURS](), "--breakdown"], pictures)[:-1], sep="\n")
        return
    if args.peers is not None:
        python = args.peers / "v_lcpp" / "bin" / "python"
        text = gguf_model(args.models, "S", "bf16", python)
        projector = projector_file(args.models, folder)
        runners["llama.cpp mtmd"] = lambda: [python, HERE / "run_mtmd.py", text, projector, *settings]
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for i in range(args.rounds):
        pictures = write_pictures(args.models / "pictures", args.images, seed=i)
        for name, command in runners.items():
            seconds[name] += json.loads(output_of(command(), pictures)[-1])
    ours = statistics.median(seconds[OURS])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name:16} first token after {median * 1e3:7.1f} ms   {median / ours:.2f} x of {OURS}")


if __name__ == "__main__":
    main()
