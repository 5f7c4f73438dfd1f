"""FP8 checkpoints of the zoo, written by code independent of the engine's.

    folder/quantized    for the engine: FP8 with scales, with the tensor names of the format
    folder/plain        for transformers: the same weights as floats

Weights are rounded block by block, one at a time, so that both hold exactly the same numbers.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.quantized_zoo import QuantizedCheckpoint, compressed

_LARGEST = 448.0
_QUANTIZED = re.compile(r"((?<!\.weights)_proj(_with_mqa|_qkvz?|_ba|_[zba])?|\.indexer\.(wq_b|wk))\.weight$")
"""Names of quantized matrices; the indexer's `weights_proj` is not quantized."""


@dataclass(frozen=True)
class Float8Scheme:
    """One format.

    Attributes:
        config: `quantization_config`.
        block: Rows and columns that share a scale; None for the whole matrix.
        scale: Name of the scale tensor.
        scale_dims: Its dimensions, if the whole matrix has one scale.
        extra: Further tensors of one element.
        floats: Matches the modules that are not quantized.
    """

    config: dict[str, Any]
    block: tuple[int | None, int | None]
    scale: str = "weight_scale"
    scale_dims: int = 2
    extra: tuple[str, ...] = ()
    floats: str = "lm_head"


def _float8(strategy: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    settings = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **weights}
    return compressed(settings, "float-quantized", inputs)


_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
_DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}

FLOAT8_SCHEMES: dict[str, Float8Scheme] = {
    "fp8-blocks": Float8Scheme({**_DEEPSEEK, "weight_block_size": [32, 16]}, (32, 16), "weight_scale_inv"),
    # Blocks that cross head and shard boundaries, and unquantized modules, one with a name similar to another's.
    "fp8-odd-blocks": Float8Scheme(
        {
            **_DEEPSEEK,
            "weight_block_size": [24, 20],
            "modules_to_not_convert": [
                "lm_head",
                "model.layers.1.self_attn",
                "model.layers.0.mlp.down",
                "layers.2.mlp",
            ],
        },
        (24, 20),
        "weight_scale_inv",
        floats=r"lm_head|layers\.1\.self_attn|layers\.2\.mlp",
    ),
    "fp8-static": Float8Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        (None, None),
        scale_dims=0,
        extra=("input_scale",),
    ),
    "fp8-one-scale": Float8Scheme({**_DEEPSEEK, "weight_block_size": None}, (None, None), "weight_scale_inv", 0),
    "fbgemm-fp8": Float8Scheme(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        (1, None),
        extra=("input_scale_ub",),
    ),
    "ct-tensor-static": Float8Scheme(_float8("tensor", _STATIC), (None, None), scale_dims=1, extra=("input_scale",)),
    "ct-channel": Float8Scheme(_float8("channel", _TOKEN), (1, None)),
    "ct-blocks": Float8Scheme(_float8("block", block_structure=[16, 32]), (16, 32)),
    "ct-groups": Float8Scheme(_float8("group", group_size=16), (1, 16)),
}


def make_float8(scheme: str, folder: Path, name: str = "llama-gqa") -> QuantizedCheckpoint:
    """Writes checkpoint `name` of the zoo, quantized by `scheme` and as floats, into `folder`."""
    return quantize_to_float8(FLOAT8_SCHEMES[scheme], folder, make_checkpoint(name, folder / "plain", tokenizer=False))


def quantize_to_float8(how: Float8Scheme, folder: Path, plain: Path) -> QuantizedCheckpoint:
    """Writes the checkpoint in `plain` into `folder`, quantized, and gives the one in `plain` the rounded weights."""
    quantized = folder / "quantized"
    quantized.mkdir()
    for path in plain.glob("*.json"):
        shutil.copy(path, quantized)
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": how.config}))

    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for tensor_name, tensor in list(tensors.items()):
        module = tensor_name.removesuffix(".weight")
        if not _QUANTIZED.search(tensor_name) or re.search(how.floats, module):
            stored[tensor_name] = tensor
            continue
        codes, scales, floats = _rounded(tensor, how.block)
        stored[tensor_name], tensors[tensor_name] = codes, floats
        stored[f"{module}.{how.scale}"] = scales if scales.numel() > 1 else scales.reshape((1,) * how.scale_dims)
        stored |= {f"{module}.{extra}": torch.tensor(0.02) for extra in how.extra}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors")
    return QuantizedCheckpoint(quantized, plain)


def _rounded(
    weight: torch.Tensor, block: tuple[int | None, int | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 codes, scales, and the floats that they represent."""
    height, width = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    shape = tuple(math.ceil(whole / size) for whole, size in zip(weight.shape, (height, width), strict=True))
    codes, scales = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(shape)
    floats = torch.zeros_like(weight)
    for i in range(shape[0]):
        for j in range(shape[1]):
            place = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = weight[place].abs().max() / _LARGEST
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            floats[place] = codes[place].float() * scales[i, j]
    return codes, scales, floats
