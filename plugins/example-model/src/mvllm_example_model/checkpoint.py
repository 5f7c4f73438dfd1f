"""Writes a checkpoint of ParallelBlock with random weights: `python -m mvllm_example_model.checkpoint FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["ParallelBlockForCausalLM"],
    "model_type": "parallel_block",
    "vocab_size": 96,
    "hidden_size": 32,
    "inner_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "dtype": "float32",
}


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by the names that the checkpoint has, [out, in], float32."""
    generator = torch.Generator().manual_seed(seed)
    size, inner, vocab_size = 32, 64, 96
    shapes: dict[str, tuple[int, ...]] = {"tokens": (vocab_size, size), "positions": (128, size)}
    for layer in range(3):
        shapes |= {f"blocks.{layer}.query": (size, size), f"blocks.{layer}.output": (size, size)}
        shapes |= {f"blocks.{layer}.key": (size // 2, size), f"blocks.{layer}.value": (size // 2, size)}
        shapes |= {f"blocks.{layer}.up": (inner, size), f"blocks.{layer}.down": (size, inner)}
        shapes |= {f"blocks.{layer}.norm": (size,)}
    shapes |= {"final_norm": (size,), "head": (vocab_size, size)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    return {name: weight + 1 if "norm" in name else weight for name, weight in weights.items()}


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Writes config.json and model.safetensors into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    save_file(make_weights(seed), folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
