"""Writes a ternary checkpoint: `python -m mvllm_example_quantization.checkpoint FOLDER TERNARY_FOLDER`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mvllm_example_quantization.matrix import pack

_QUANTIZED = re.compile(r"(.*_proj)\.weight")


def convert(source: Path, folder: Path) -> Path:
    """Writes the checkpoint in `source` (one file, Llama's names) into `folder` with ternary matrices; returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "ternary", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if (match := _QUANTIZED.fullmatch(name)) is None:
            tensors[name] = tensor
        else:
            tensors[f"{match[1]}.ternary"], tensors[f"{match[1]}.scale"] = pack(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
