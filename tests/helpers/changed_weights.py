"""A copy of a checkpoint with other weights, and its tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def changed_copy(folder: Path, copy: Path, seed: int = 1) -> Path:
    """A copy of a checkpoint of `make_checkpoint` in which every weight of floats is another one."""
    shutil.copytree(folder, copy)
    generator = torch.Generator().manual_seed(seed)
    for file in copy.glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.is_floating_point():
                factor = 1 + 0.3 * torch.rand(tensor.shape, generator=generator)
                tensor.copy_(tensor.float() * factor + 0.02 * torch.randn(tensor.shape, generator=generator))
        save_file(tensors, file, metadata={"format": "pt"})
    return copy


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def copy_without_head(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint without language-model head, as embedding models are published. Returns `folder`."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(file).items() if "lm_head." not in name}
        save_file(kept, file, metadata={"format": "pt"})
    if (index := folder / "model.safetensors.index.json").is_file():
        values = json.loads(index.read_text())
        values["weight_map"] = {name: file for name, file in values["weight_map"].items() if "lm_head." not in name}
        index.write_text(json.dumps(values))
    return folder
