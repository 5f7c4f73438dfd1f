"""Builders of safetensors files and of a small model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mvllm.layers.weight_target import WeightTarget


def box(*ranges: tuple[int, int]) -> tuple[slice, ...]:
    """(2, 4), (0, 8) -> slices."""
    return tuple(slice(start, stop) for start, stop in ranges)


class ToyModel(nn.Module):
    """A shard of q and k fused (as sharded projections are), a transposed matrix, a norm and an embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=10)
        self.embed = nn.Parameter(torch.full((10, 4), torch.nan, dtype=dtype))
        self.qk = nn.Parameter(torch.full((6, 4), torch.nan, dtype=dtype))
        self.fc = nn.Parameter(torch.full((3, 5), torch.nan, dtype=dtype))
        self.norm = nn.Parameter(torch.full((4,), torch.nan, dtype=dtype))

    def weight_targets(self) -> dict[str, list[WeightTarget]]:
        whole_embed, whole_norm = box((0, 10), (0, 4)), box((0, 4))
        return {
            "model.embed.weight": [WeightTarget(self.embed, (10, 4), whole_embed, whole_embed)],
            "model.layers.0.q.weight": [WeightTarget(self.qk, (4, 8), box((2, 4), (4, 8)), box((0, 2), (0, 4)))],
            "model.layers.0.k.weight": [WeightTarget(self.qk, (4, 4), box((0, 4), (0, 4)), box((2, 6), (0, 4)))],
            "model.layers.0.fc.weight": [
                WeightTarget(self.fc, (5, 3), box((0, 5), (0, 3)), box((0, 3), (0, 5)), transpose=True)
            ],
            "model.norm.weight": [WeightTarget(self.norm, (4,), whole_norm, whole_norm)],
        }

    def ignores(self, name: str) -> bool:
        return name.endswith("inv_freq")

    def given_name(self, name: str) -> str:
        return name


def toy_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint for ToyModel."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: targets[0].source_shape for name, targets in ToyModel().weight_targets().items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def assert_holds(model: ToyModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Asserts that the model's parameters equal the checkpoint, converted to its dtype."""
    tensors = {name.removeprefix("model."): tensor.to(model.norm.dtype) for name, tensor in tensors.items()}
    assert torch.equal(model.embed, tensors["embed.weight"])
    assert torch.equal(model.qk[:2], tensors["layers.0.q.weight"][2:4, 4:8])
    assert torch.equal(model.qk[2:], tensors["layers.0.k.weight"])
    assert torch.equal(model.fc, tensors["layers.0.fc.weight"].T)
    assert torch.equal(model.norm, tensors["norm.weight"])


def write_raw(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any header (a JSON value, or raw bytes) and any data; `length` overrides the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))
