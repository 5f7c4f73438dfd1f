"""Time of weight updates of the 162 M model: python tests/perf/weight_update.py

Each source is timed several times, alternating, from the call to its return, steps not included. Shared memory is
written before the time starts; `tensors` are those of this process. Prints the median in milliseconds, and the
bandwidth over the checkpoint's bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from perf_models import checkpoint
from safetensors.torch import load_file

from mvllm import LLM, SharedMemoryWeights


def main() -> None:
    parser = argparse.ArgumentParser(description="Time weight updates.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    args = parser.parse_args()
    folder = checkpoint("small")
    tensors = load_file(folder / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    settings = {"dtype": args.dtype, "quantization": args.quantization, "max_model_len": 512}
    with (
        LLM(str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 26, **settings) as llm,
        SharedMemoryWeights(tensors) as weights,
    ):
        sources: dict[str, Callable[[], None]] = {
            "shared memory": lambda: llm.update_weights(shared_memory=weights.name),
            "tensors": lambda: llm.update_weights(tensors=tensors),
            "folder": lambda: llm.update_weights(path=folder),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sources}
        for round_ in range(args.rounds + 1):
            for name, update in sources.items():
                start = time.perf_counter()
                update()
                if round_:  # the first touches memory for the first time
                    seconds[name].append(time.perf_counter() - start)
    for name, measured in seconds.items():
        median = statistics.median(measured)
        print(f"{name:15} {1000 * median:7.1f} ms   {num_bytes / median / 1e9:5.2f} GB/s")


if __name__ == "__main__":
    main()
