"""MXFP4 packer, written from the format's specification, independent of the engine's unpacking."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

_CODES = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}
_GROUP = 32


def pack_row(row: np.ndarray) -> tuple[list[list[int]], list[int], list[float]]:
    """The blocks and scales of a row, and the floats that they represent."""
    blocks, scales, floats = [], [], []
    for start in range(0, len(row), _GROUP):
        group = row[start : start + _GROUP]
        largest = float(np.abs(group).max())
        exponent = math.floor(math.log2(largest)) - 2 if largest else -127
        codes = []
        for value in group:
            magnitude = min(_CODES, key=lambda m: abs(m - abs(value) / 2.0**exponent))
            codes.append(_CODES[magnitude] | (8 if value < 0 else 0))
            floats.append(math.copysign(magnitude * 2.0**exponent, value))
        blocks.append([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
        scales.append(exponent + 127)
    return blocks, scales, floats


def pack_experts(plain: Path, packed: Path) -> None:
    """Writes the GPT-OSS checkpoint in `plain` to `packed`, experts in MXFP4; `plain` then holds the same floats."""
    shutil.copytree(plain, packed)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        rows = tensor.transpose(1, 2)  # [experts, out, in]
        packed_rows = [pack_row(row) for row in rows.flatten(0, 1).double().numpy()]
        shape = rows.shape[:2]
        stored[f"{name}_blocks"] = torch.tensor([b for b, _, _ in packed_rows], dtype=torch.uint8).unflatten(0, shape)
        stored[f"{name}_scales"] = torch.tensor([s for _, s, _ in packed_rows], dtype=torch.uint8).unflatten(0, shape)
        floats = torch.tensor([f for _, _, f in packed_rows], dtype=torch.float32).unflatten(0, shape)
        tensors[name] = floats.transpose(1, 2).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (packed / "config.json").write_text(json.dumps(config))
