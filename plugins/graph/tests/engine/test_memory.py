"""Peak memory while a model that runs as a graph is loaded: one copy of the weights, the runtime's own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.graph.tests.interpreter_platform import graph_platform_path
from safetensors.torch import save_file
from transformers import LlamaConfig

ROOT = Path(__file__).parents[2]
VOCAB = 4096
MEBIBYTE = 1 << 20

pytestmark = [pytest.mark.exhaustive, pytest.mark.serial, pytest.mark.timeout(1200)]


def write_llama(folder: Path, hidden: int, layers: int) -> int:
    """A Llama with random weights; returns the bytes of its file."""
    inner = 4 * hidden
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    shapes = {"model.embed_tokens": (VOCAB, hidden), "lm_head": (VOCAB, hidden), "model.norm": (hidden,)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return (folder / "model.safetensors").stat().st_size


def measure(folder: Path, platform: str, plugins: list[str]) -> dict[str, Any]:
    path = os.pathsep.join([*plugins, str(ROOT), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-m", "plugins.graph.tests.peak_memory", str(folder), platform],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("platform", ["graph-interpreter", "mlx"])
def test_the_peak_while_loading_is_one_copy_of_the_weights(tmp_path: Path, platform: str) -> None:
    if platform == "mlx" and importlib.util.find_spec("mlx") is None:
        pytest.skip("mlx is not installed: python3 ci/matrix.py run mlx installs it")
    plugins = [str(entry) for entry in graph_platform_path(tmp_path / "plugins")]
    small, large = tmp_path / "small", tmp_path / "large"
    write_llama(small, 64, 2)
    size = write_llama(large, 1024, 8)
    before, found = measure(small, platform, plugins), measure(large, platform, plugins)
    worker, compiler = (found[name] - before[name] for name in ("worker", "compiler"))
    print(f"{platform}: file {size:,} bytes; above a model without weights: worker {worker:,}, compiler {compiler:,}")
    # Modules that are loaded, buffers of messages, and memory that the allocator keeps for the next module.
    assert worker + compiler < 1.5 * size
