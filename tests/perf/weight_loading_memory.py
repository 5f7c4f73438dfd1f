"""Peak memory of loading a checkpoint, compared with the size of its weights.

    python tests/perf/weight_loading_memory.py [--mib 600]

A new process loads a synthetic checkpoint (three shards, a large embedding) into a model of the same dtype. Each tensor
is packed for the CPU platform's kernels as soon as it is loaded, as layers do. The peak is that process's largest
resident memory (VmHWM; ru_maxrss would include the parent's memory at the fork), so it includes the interpreter and
torch. The limit is the weights plus 300 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALLOWED_EXTRA = 300_000_000
WIDTH = 1024

_LOAD = """
import json, os, re, sys, time
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as workers have it
import torch
from torch import nn
from pathlib import Path
from mvllm.layers.weight_target import WeightTarget
from mvllm.models.weight_loader import load_weights

class Model(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.shapes = shapes
        self.parts = nn.ParameterList(nn.Parameter(torch.empty(s, dtype=torch.bfloat16)) for s in shapes.values())
        self.packed = []
        self.bytes = sum(p.numel() * p.element_size() for p in self.parts)
    def prepare(self, name):
        i = list(self.shapes).index(name)
        weight = self.parts[i].data
        assert float(weight[-1, -1]) == 1.0
        self.packed.append(pack(weight))
        self.parts[i] = nn.Parameter(torch.empty(0))
    def weight_targets(self):
        whole = [tuple(slice(0, n) for n in shape) for shape in self.shapes.values()]
        return {n: [WeightTarget(p, s, w, w)] for (n, s), p, w in zip(self.shapes.items(), self.parts, whole)}
    def ignores(self, name):
        return False

    def given_name(self, name):
        return name

from mvllm_cpu import kernels
from mvllm_cpu.linear import Linear
loaded = kernels.load()
pack = torch.clone if loaded.library is None else Linear(loaded.library, loaded.isa).pack
folder, shapes = Path(sys.argv[1]), json.loads(sys.argv[2])
model = Model({name: tuple(shape) for name, shape in shapes.items()})
start = time.perf_counter()
load_weights(model, folder, use_tqdm=False, on_loaded=model.prepare)
seconds = time.perf_counter() - start
assert len(model.packed) == len(shapes)
print(json.dumps({
    "weights": model.bytes,
    "peak": int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024,
    "seconds": seconds,
}))
"""


def write_checkpoint(folder: Path, mib: int) -> dict[str, list[int]]:
    """bf16 ones in three shards, the first a single tensor of half the size; returns the shapes by name."""
    import torch
    from safetensors.torch import save_file

    rows = mib * (1 << 20) // (2 * WIDTH)
    shapes = {"embed": [rows // 2, WIDTH]}
    shapes |= {f"layers.{i}.weight": [rows // 16, WIDTH] for i in range(8)}
    names = list(shapes)
    for number, part in enumerate((names[:1], names[1:5], names[5:]), start=1):
        tensors = {name: torch.ones(shapes[name], dtype=torch.bfloat16) for name in part}
        save_file(tensors, folder / f"model-{number:05d}-of-00003.safetensors")
    return shapes


def measure(mib: int) -> dict[str, float]:
    """Bytes of the weights, peak bytes of the loading process, its seconds, and those of `cat` on the same files."""
    with tempfile.TemporaryDirectory() as name:
        shapes = write_checkpoint(Path(name), mib)
        files = sorted(Path(name).iterdir())
        read = time.perf_counter()
        subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
        read = time.perf_counter() - read
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, name, json.dumps(shapes)], capture_output=True, text=True, check=True
        )
    return {**json.loads(done.stdout), "read": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=600)
    found = measure(parser.parse_args().mib)
    extra = found["peak"] - found["weights"]
    print(f"weights {found['weights'] / 1e6:.0f} MB, loaded in {found['seconds']:.2f} s (cat {found['read']:.2f} s)")
    print(
        f"peak    {found['peak'] / 1e6:.0f} MB = weights + {extra / 1e6:.0f} MB (allowed: {ALLOWED_EXTRA / 1e6:.0f} MB)"
    )
    sys.exit(extra > ALLOWED_EXTRA)


if __name__ == "__main__":
    main()
