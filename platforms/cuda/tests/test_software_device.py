"""The engine on the CUDA platform over a device whose tensors are not the host's: see software_platform.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import platforms.cuda.tests.interpreted  # noqa: F401  # skips without Triton
import pytest
from platforms.cuda.tests import software_plugin

from tests.helpers.plugins import EXAMPLE_SOURCE, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

CASES = (
    "llama-gqa:sampled,graphs,triton",
    "llama-gqa:offload",
    "llama-gqa:lora,graphs",
    "llama-gqa:int8",
    "llama-gqa:float8_e4m3fn",
    "gemma2:graphs",
    "phi3-longrope-window",
    "qwen3moe:graphs",
    "gptoss",
    "deepseek3",
    "bamba:graphs",
    "qwen3next",
)
"""Besides the plain one: samplers, kernels of products, adapters, 8-bit caches, windows, experts, sinks, latents and
states, and captured steps."""


@pytest.fixture
def run(tmp_path):
    """`run(module, *arguments)`: the output of a module in a process of its own."""
    path = [*software_plugin.path(tmp_path / "plugins"), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}

    def call(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    library = EXAMPLE_SOURCE / "mvllm_example_device" / "_device.so"
    assert library.exists(), f"{library} is not there: `python3 ci/dev.py setup` compiles it"
    return call


def check(run, tmp_path, case):
    output = run("-m", "platforms.cuda.tests.software_engine", str(tmp_path), case)
    found = json.loads(output.splitlines()[-1])[case]
    assert isinstance(found, dict), found
    assert found["software"]["tokens"] == found["cpu"]["tokens"]
    assert bool(found["software"]["replays"]) == ("graphs" in case)
    if "offload" in case:
        assert found["software"]["cached"][0] > 0


def test_an_engine_does_not_mix_tensors_of_the_host_and_of_the_device(run, tmp_path):
    check(run, tmp_path, "llama-gqa")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_engines_of_every_kind_do_not_mix_tensors_of_the_host_and_of_the_device(case, run, tmp_path):
    check(run, tmp_path, case)


MIXES = """
import platforms.cuda.tests.software_platform as software
import torch
from mvllm_triton import norm

software.open_device()
device = torch.device("example", 0)
x, weight = torch.ones(2, 64, device=device), torch.ones(64)
print(norm.rms_norm(x, weight.to(device), 1e-6).cpu().sum().item())
for mix in (lambda: norm.rms_norm(x, weight, 1e-6), lambda: x + weight, x.numpy):
    try:
        mix()
    except Exception as e:
        print(type(e).__name__, str(e).splitlines()[0])
    else:
        print("nothing was raised")
"""


@pytest.mark.exhaustive
def test_the_device_refuses_what_a_gpu_would(run):
    right, launch, operation, array = run("-c", MIXES).splitlines()
    assert float(right) == pytest.approx(128, rel=1e-4)
    assert "kernel" in launch and "weight (cpu)" in launch
    assert "found at least two devices" in operation
    assert array.startswith("TypeError")
