"""The benchmarked engines: mvllm, and each peer installed in a virtual environment under one folder.

A peer is identified by the packages of an environment, not by its name. No module of a peer is imported here: its
runner is a program for its own Python.

Precisions are those of the engine's usual format, and include the whole model:

    bf16   every engine in bf16                          mvllm, vLLM, OpenVINO, llama.cpp, transformers, mlx-lm
    int8   mvllm: int8 weights and activations, head included; vLLM, and mvllm from the same checkpoint: likewise, the
           head in bf16; OpenVINO: weights of 8 bits, head included; llama.cpp: Q8_0; mlx-lm: groups of 64
    int4   mvllm: groups of 32 with zero points, the head in 8 bits; OpenVINO: groups of 128, the head in 8 bits;
           llama.cpp: Q4_0, the head in Q6_K; mlx-lm: groups of 64, head included
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.perf.cpu_bench.limits import BF16, WeightFormat

RUNNERS = Path(__file__).parent / "runners"
PRECISIONS = ("bf16", "int8", "int4")
KV_CACHE_BYTES = 2**30  # of every engine

TORCH_LIBRARIES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True)
class Engine:
    """One row of the table, for one precision.

    Attributes:
        name: Name in the table.
        precision: bf16, int8 or int4.
        runner: The program that runs it.
        python: The Python interpreter for that program.
        model: Format of the model, see `models.py`.
        weights: Weight format that the row's bound is computed from.
        ours: Whether it is mvllm.
        options: Additional arguments for the runner.
        preload: Libraries that the engine's documentation recommends to preload.
        server: Arguments of its HTTP server, after its Python and before the model; None if it has no server.
    """

    name: str
    precision: str
    runner: Path
    python: Path
    model: str
    weights: WeightFormat
    ours: bool = False
    options: tuple[str, ...] = ()
    preload: tuple[Path, ...] = ()
    server: tuple[str, ...] | None = None

    def environment(self, threads: int) -> dict[str, str]:
        """Environment variables of its process."""
        kept = dict(os.environ)
        if self.ours:
            kept.setdefault("MVLLM_PLATFORM", "cpu")  # other installed platforms may be available too
        else:
            kept.pop("PYTHONPATH", None)
        if self.preload:
            kept["LD_PRELOAD"] = ":".join(map(str, self.preload))
        return kept | {
            "OMP_NUM_THREADS": str(self.threads(threads)),
            "HF_HUB_OFFLINE": "1",
            "MVLLM_LOGGING_LEVEL": "WARNING",
        }

    def server_environment(self, threads: int) -> dict[str, str]:
        """Environment variables of its HTTP server, from which some engines read settings."""
        theirs = {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_BYTES >> 30),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        }
        return self.environment(threads) | ({} if self.ours else theirs)

    def threads(self, threads: int) -> int:
        """Threads of each of its processes, if `threads` are available in total."""
        sizes = [option.partition("=")[2] for option in self.options if option.startswith("tensor_parallel_size=")]
        ranks = int(sizes[0]) if sizes else 1
        return max(1, threads // ranks)


def our_engines(threads: int) -> list[Engine]:
    """mvllm in each precision, and with two ranks if there are enough threads."""
    python, runner = Path(sys.executable), RUNNERS / "run_mvllm.py"
    int8, w8a8 = WeightFormat(8, 8, int8_products=True), WeightFormat(8, 16, int8_products=True)
    int4, quantized = WeightFormat(4.31, 8, int8_products=True), ("checkpoint=quantized",)
    found = [
        Engine("mvllm", "bf16", runner, python, "hf", BF16, ours=True, server=_our_server()),
        Engine("mvllm", "int8", runner, python, "hf", int8, ours=True, server=_our_server("int8")),
        Engine(
            *("mvllm w8a8", "int8", runner, python, "hf-w8a8", w8a8), ours=True, options=quantized, server=_our_server()
        ),
        Engine("mvllm", "int4", runner, python, "hf", int4, ours=True, server=_our_server("int4")),
    ]
    if threads >= 2:
        found.insert(
            1, Engine("mvllm tp2", "bf16", runner, python, "hf", BF16, ours=True, options=("tensor_parallel_size=2",))
        )
    return found


def _our_server(quantization: str | None = None) -> tuple[str, ...]:
    options = ("--dtype", "bfloat16", *(("--quantization", quantization) if quantization else ()))
    # The model comes last, after an option that takes it as its value.
    return (
        "-m",
        "mvllm.entrypoints.cli.main",
        "serve",
        *options,
        "--kv-cache-memory-bytes",
        str(KV_CACHE_BYTES),
        "--model",
    )


def on_platform(engines: Sequence[Engine], platform: str) -> list[Engine]:
    """The rows of mvllm with default settings, on `platform`.

    They run in the environment that `ci/dev.py conform` makes for a platform with a runtime of its own, if it is there.
    """
    rows = [engine for engine in engines if not engine.options]
    option, own = f"platform={json.dumps(platform)}", Path(sys.prefix).with_name(f".venv-{platform}") / "bin" / "python"
    return [
        replace(
            row,
            name=f"mvllm on {platform}",
            python=own if own.exists() else row.python,
            options=(option,),
            server=None,
        )
        for row in rows
    ]


def with_settings(engine: Engine, settings: str) -> Engine:
    """`engine` with additional settings, as NAME=JSON,NAME=JSON, to try other defaults."""
    more = tuple(settings.split(","))
    return replace(engine, name=f"{engine.name} {settings}", options=(*engine.options, *more), server=None)


ASK = """
import importlib.metadata as m, json
names = ["vllm-cpu", "vllm", "openvino-genai", "llama-cpp-python", "mlx-lm", "transformers", "optimum-intel"]
found = {d.metadata["Name"].lower().replace("_", "-") for d in m.distributions()}
print(json.dumps([n for n in names if n in found]))
"""


def installed_peers(folder: Path | None) -> list[Engine]:
    """The peers in the virtual environments under `folder`."""
    found: list[Engine] = []
    for python in sorted(folder.glob("*/bin/python")) if folder else []:
        answer = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=120)
        if answer.returncode == 0:
            found += peers_with(set(json.loads(answer.stdout)), python)
    return found


def peers_with(packages: set[str], python: Path) -> list[Engine]:
    """The engines that an environment with `packages` can run."""
    if packages & {"vllm", "vllm-cpu"}:
        libraries = [Path(folder) / name for folder in LIBRARY_FOLDERS for name in TORCH_LIBRARIES]
        preload = [path for path in (*libraries, python.parent.parent / "lib" / "libiomp5.so") if path.exists()]
        server = ("-m", "vllm.entrypoints.openai.api_server", "--dtype", "bfloat16", "--model")
        runner, preloaded = RUNNERS / "run_vllm.py", tuple(_one_allocator(preload))
        w8a8 = WeightFormat(8, 16, int8_products=True)
        return [
            Engine("vLLM", "bf16", runner, python, "hf", BF16, preload=preloaded, server=server),
            Engine("vLLM w8a8", "int8", runner, python, "hf-w8a8", w8a8, preload=preloaded, server=server),
        ]
    if "openvino-genai" in packages:
        runner = RUNNERS / "run_openvino.py"
        return [
            Engine("OpenVINO", "bf16", runner, python, "ov-fp16", BF16),
            Engine("OpenVINO", "int8", runner, python, "ov-int8", WeightFormat(8, 8, int8_products=True)),
            Engine("OpenVINO", "int4", runner, python, "ov-int4", WeightFormat(4.1, 8, int8_products=True)),
        ]
    if "llama-cpp-python" in packages:
        runner = RUNNERS / "run_llama_cpp.py"
        return [
            Engine("llama.cpp", "bf16", runner, python, "gguf-bf16", BF16),
            Engine("llama.cpp Q8_0", "int8", runner, python, "gguf-q8_0", WeightFormat(8.5, 8.5, int8_products=True)),
            Engine("llama.cpp Q4_0", "int4", runner, python, "gguf-q4_0", WeightFormat(4.5, 6.6, int8_products=True)),
        ]
    if "mlx-lm" in packages:
        runner = RUNNERS / "run_mlx_lm.py"
        return [
            Engine("mlx-lm", "bf16", runner, python, "hf", BF16),
            Engine("mlx-lm", "int8", runner, python, "hf", WeightFormat(8.5, 8.5)),
            Engine("mlx-lm", "int4", runner, python, "hf", WeightFormat(4.5, 4.5)),
        ]
    if "transformers" in packages:
        return [Engine("transformers", "bf16", RUNNERS / "run_transformers.py", python, "hf", BF16)]
    return []


def _one_allocator(libraries: list[Path]) -> list[Path]:
    """Removes the second of two allocators."""
    allocators = [path for path in libraries if "tcmalloc" in path.name]
    return [*allocators[:1], *(path for path in libraries if path not in allocators)]
