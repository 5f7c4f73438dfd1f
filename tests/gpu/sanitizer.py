"""Two kernels under compute-sanitizer: reads and writes out of bounds (memcheck), and races (racecheck).

`python -m tests.gpu.sanitizer PLATFORM KERNEL` launches one of them, without the sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.gpu.result_log import FAILED, OK, ResultLog, Row, one_line
from tests.gpu.settings import ROOT, Item, Settings

TOOL = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
"""Where the tool is, if not in a folder of PATH."""
CHECKS = ("memcheck", "racecheck")
KERNELS = ("attention decode", "quantized linear")
ERROR = 9  # exit status that the tool gives when it has found something
SIDE_BY_SIDE = 4


def items(settings: Settings) -> list[Item]:
    """Each kernel with each check."""
    if settings.on_host:
        obstacle = f"needs a device: platform {settings.platform} runs on the host"
    else:
        obstacle = "" if _tool() else f"{TOOL}, a program of the CUDA toolkit, is not in PATH or {' or '.join(PLACES)}"
    return [Item(f"{kernel}, {check}", 15, 90, obstacle=obstacle) for check in CHECKS for kernel in KERNELS]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    kernel, _, check = item.partition(", ")
    options = ["--tool", check, "--error-exitcode", str(ERROR), "--target-processes", "all"]
    command = [str(_tool()), *options, sys.executable, "-m", "tests.gpu.sanitizer", settings.platform, kernel]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else overruns end in the cache's memory
    log = settings.out / "logs" / f"sanitizer-{item.replace(', ', '-').replace(' ', '-')}.log"
    with log.open("wb") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment).returncode
    lines = log.read_text(errors="replace").strip().splitlines()
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), lines[-1] if lines else "it said nothing")
    result_log.add(Row("sanitizer", item, item, FAILED if status else OK, {"status": status}, one_line(summary)))


def launch(platform: str, kernel: str) -> None:
    """Launches a kernel with a few small shapes, at the edges of its tiles."""
    from tests.gpu.device import open_device
    from tests.gpu.kernels import attention_call, open_layer

    settings = Settings(platform, Path(), Path(), float("inf"), quick=True)
    with open_device(platform) as runtime:
        if kernel == "attention decode":
            layer = open_layer(runtime, settings, 4096)
            for lengths in ([33], [1, 257, 500]):
                attention_call(layer, [(length - 1, 1) for length in lengths])()
        else:
            _quantized_linear(runtime)
        runtime.synchronize()


def _quantized_linear(runtime: object) -> None:
    """Products with a weight of int4, of one row and of more than a tile has."""
    from typing import Any

    import torch

    from mvllm_triton.quantized_linear import PackedIntegers, inner_columns, quantized_linear

    device: Any = runtime
    inner, outer, group = 256, 192, 128
    scales = device.empty((inner // group, outer), torch.float32).fill_(0.01)
    zeros = device.empty((inner // group, outer), torch.int8).fill_(8)
    data = device.empty((outer, inner // 2), torch.uint8).fill_(0x5A)
    weight = PackedIntegers(data, scales, zeros, group, 4, False, inner, outer, inner_columns(inner, group))
    for rows in (1, 17, 70):
        found = quantized_linear(device.empty((rows, inner), torch.bfloat16).fill_(1.0), weight, None)
        assert found.shape == (rows, outer)


def _tool() -> str | None:
    return shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))


if __name__ == "__main__":
    launch(*sys.argv[1:])
