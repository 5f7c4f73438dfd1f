"""Quantized checkpoints of the zoo, packed by code independent of the engine's.

    folder/quantized    for the engine: integers, packed element by element as the format specifies
    folder/plain        for transformers: the same weights as floats

Values are drawn by rounding the zoo's own weights, so that both hold exactly the same numbers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.model_zoo import make_checkpoint

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the eight values in a word, from its lowest bits."""


_MATRICES = re.compile(
    r"(_proj(_qkvz?|_ba|_[zba])?|\.w[123]|lm_head|c_attn|c_proj|c_fc|query_key_value|dense|dense_h_to_4h|dense_4h_to_h)"
    r"\.weight$"
)


@dataclass
class Rounded:
    """A quantized matrix.

    Attributes:
        values: [out, in], from 0 up to 2**bits - 1.
        zeros: [out, groups], likewise.
        scales: [out, groups], float32, exactly representable in float16.
        groups: [in]: the group of each column.
        bits: Bits per value.
    """

    values: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray
    bits: int

    def floats(self) -> torch.Tensor:
        """The dequantized matrix, float32."""
        centred = self.values.astype(np.float64) - self.zeros[:, self.groups]
        return torch.from_numpy((centred * self.scales[:, self.groups]).astype(np.float32))


def round_matrix(
    weight: torch.Tensor, bits: int, group_size: int | None, *, symmetric: bool, act_order: bool = False
) -> Rounded:
    """Integers near `weight` [out, in]; with `act_order` the columns belong to groups in a shuffled order."""
    floats = weight.double().numpy()
    num_columns = floats.shape[1]
    size = num_columns if group_size is None else group_size
    order = np.random.default_rng(num_columns).permutation(num_columns) if act_order else np.arange(num_columns)
    groups = np.empty(num_columns, dtype=np.int32)
    groups[order] = np.arange(num_columns) // size
    num_groups, steps = -(-num_columns // size), 2**bits - 1
    zeros = np.empty((len(floats), num_groups), dtype=np.int64)
    scales = np.empty((len(floats), num_groups), dtype=np.float32)
    for group in range(num_groups):
        inside = floats[:, groups == group]
        low, high = inside.min(axis=1), inside.max(axis=1)
        if symmetric:
            scale = np.maximum(abs(low), abs(high)) / (2 ** (bits - 1) - 1)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            scale = (np.maximum(high, 0) - np.minimum(low, 0)) / steps
            zeros[:, group] = np.clip(np.round(-np.minimum(low, 0) / scale), 0, steps)
        scales[:, group] = scale.astype(np.float16)
    values = np.clip(np.round(floats / scales[:, groups]) + zeros[:, groups], 0, steps).astype(np.int64)
    return Rounded(values, zeros, scales, groups, bits)


def words(values: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """[a, n] as int32 [a, ceil(n · bits / 32)]: values packed in order."""
    per_word = 32 // bits
    packed = np.zeros((values.shape[0], -(-values.shape[1] // per_word)), dtype=np.uint64)
    for column in range(values.shape[1]):
        place = column % per_word if places is None else places[column % per_word]
        packed[:, column // per_word] |= values[:, column].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


Packer = Callable[[str, Rounded], dict[str, torch.Tensor]]


def pack_awq(name: str, matrix: Rounded) -> dict[str, torch.Tensor]:
    return {
        f"{name}.qweight": words(matrix.values.T, 4, _AWQ_PLACES),
        f"{name}.qzeros": words(matrix.zeros.T, 4, _AWQ_PLACES),
        f"{name}.scales": torch.from_numpy(matrix.scales.T.copy()).half(),
    }


def pack_gptq(name: str, matrix: Rounded, *, less: int = 1) -> dict[str, torch.Tensor]:
    return {
        f"{name}.qweight": words(matrix.values, matrix.bits).T.contiguous(),
        f"{name}.qzeros": words((matrix.zeros.T - less) % 2**matrix.bits, matrix.bits),
        f"{name}.scales": torch.from_numpy(matrix.scales.T.copy()).half(),
        f"{name}.g_idx": torch.from_numpy(matrix.groups),
    }


def pack_gptq_v2(name: str, matrix: Rounded) -> dict[str, torch.Tensor]:
    return pack_gptq(name, matrix, less=0)


def pack_quantized(name: str, matrix: Rounded) -> dict[str, torch.Tensor]:
    tensors = {
        f"{name}.weight_packed": words(matrix.values, matrix.bits),
        f"{name}.weight_scale": torch.from_numpy(matrix.scales).half(),
        f"{name}.weight_shape": torch.tensor(matrix.values.shape),
    }
    if (matrix.zeros != 2 ** (matrix.bits - 1)).any():
        tensors[f"{name}.weight_zero_point"] = words(matrix.zeros.T, matrix.bits).T.contiguous()
    if (np.diff(matrix.groups) < 0).any():
        tensors[f"{name}.weight_g_idx"] = torch.from_numpy(matrix.groups)
    return tensors


def int_quantized(name: str, matrix: Rounded) -> dict[str, torch.Tensor]:
    tensors = {
        f"{name}.weight": torch.from_numpy(matrix.values - 128).to(torch.int8),
        f"{name}.weight_scale": torch.from_numpy(matrix.scales),
    }
    if (matrix.zeros != 128).any():
        tensors[f"{name}.weight_zero_point"] = torch.from_numpy(matrix.zeros - 128).to(torch.int8)
    return tensors


@dataclass(frozen=True)
class Scheme:
    """One quantized format.

    Attributes:
        config: `quantization_config`.
        pack: Tensors of one matrix.
        bits, group_size, symmetric, act_order: How matrices are rounded.
        floats: Matches the modules that are not quantized.
        int8_activations: Inputs are rounded at run time.
    """

    config: dict[str, Any]
    pack: Packer
    bits: int = 4
    group_size: int | None = 32
    symmetric: bool = False
    act_order: bool = False
    floats: str = "lm_head"
    int8_activations: bool = False


def _gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, **settings}


def compressed(
    weights: dict[str, Any], format: str = "pack-quantized", inputs: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    group = {
        "targets": ["Linear"],
        "output_activations": None,
        "input_activations": inputs,
        "weights": {"type": "int", "dynamic": False, "block_structure": None, "observer": "minmax", **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        **settings,
    }


PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True, "group_size": None}
_GROUP = {"num_bits": 4, "strategy": "group", "symmetric": True, "group_size": 32}

SCHEMES: dict[str, Scheme] = {
    "awq": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, pack_awq
    ),
    "awq-some-floats": Scheme(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 16,
            "zero_point": True,
            "version": "GEMM",
            "modules_to_not_convert": ["layers.1.", "down_proj"],
        },
        pack_awq,
        group_size=16,
        floats=r"lm_head|layers\.1\.|down_proj",
    ),
    "awq-latent": Scheme(  # the projections that make MLA's latents stay floats
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["kv_a_proj_with_mqa"],
        },
        pack_awq,
    ),
    "gptq": Scheme(_gptq(), pack_gptq),
    "gptq-symmetric-v2": Scheme(_gptq(sym=True, checkpoint_format="gptq_v2"), pack_gptq_v2, symmetric=True),
    "gptq-rows": Scheme(_gptq(group_size=-1), pack_gptq, group_size=None),
    "gptq-8-bits": Scheme(_gptq(bits=8), pack_gptq, bits=8),
    "gptq-desc-act": Scheme(_gptq(desc_act=True), pack_gptq, act_order=True),
    "gptq-head-and-rules": Scheme(
        _gptq(lm_head=True, dynamic={r"-:.*\.layers\.2\..*": {}, r"+:.*o_proj": {"bits": 8, "sym": True}}),
        lambda name, matrix: pack_gptq(name, matrix),
        floats=r"layers\.2\.",
    ),
    "w4a16": Scheme(compressed(_GROUP), pack_quantized, symmetric=True),
    "w4a16-zero-points": Scheme(compressed({**_GROUP, "symmetric": False}), pack_quantized),
    "w4a16-actorder": Scheme(
        compressed({**_GROUP, "actorder": "group"}), pack_quantized, symmetric=True, act_order=True
    ),
    "w8a16-rows": Scheme(compressed(_CHANNEL), pack_quantized, bits=8, group_size=None, symmetric=True),
    "w8a8": Scheme(
        compressed(_CHANNEL, "int-quantized", PER_TOKEN),
        int_quantized,
        bits=8,
        group_size=None,
        symmetric=True,
        int8_activations=True,
    ),
    "w8a8-zero-points": Scheme(
        compressed(
            {**_CHANNEL, "symmetric": False},
            "int-quantized",
            PER_TOKEN,
            ignore=["lm_head", r"re:.*layers\.0\.mlp\..*"],
        ),
        int_quantized,
        bits=8,
        group_size=None,
        floats=r"lm_head|layers\.0\.mlp\.",
        int8_activations=True,
    ),
}


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A quantized checkpoint and the same weights as floats.

    Attributes:
        quantized: Folder of the packed checkpoint.
        plain: Folder of the same weights in float32.
        matrices: The quantized matrices by module name.
    """

    quantized: Path
    plain: Path
    matrices: dict[str, Rounded] = field(default_factory=dict)


def make_quantized(scheme: str, folder: Path, name: str = "llama-gqa") -> QuantizedCheckpoint:
    """Writes checkpoint `name` of the zoo, quantized by `scheme` and as floats, into `folder`."""
    return quantize(SCHEMES[scheme], folder, make_checkpoint(name, folder / "plain", tokenizer=False), scheme)


def quantize(how: Scheme, folder: Path, plain: Path, scheme: str = "") -> QuantizedCheckpoint:
    """Writes the checkpoint in `plain` into `folder`, quantized, and gives the one in `plain` the rounded weights."""
    quantized = folder / "quantized"
    quantized.mkdir()
    for path in plain.glob("*.json"):
        shutil.copy(path, quantized)
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": how.config}))

    tensors, packed, matrices = load_file(plain / "model.safetensors"), {}, {}
    for tensor_name, tensor in list(tensors.items()):
        module = tensor_name.removesuffix(".weight")
        if not _MATRICES.search(tensor_name) or _is_float(how, module):
            packed[tensor_name] = tensor
            continue
        transposed = ".c_" in tensor_name and not tensor_name.startswith("model.layers.")
        bits, symmetric = (8, True) if _is_8_bit(scheme, module) else (how.bits, how.symmetric)
        matrix = round_matrix(
            tensor.T if transposed else tensor, bits, how.group_size, symmetric=symmetric, act_order=how.act_order
        )
        matrices[module] = matrix
        packed |= how.pack(module, matrix)
        floats = matrix.floats()
        tensors[tensor_name] = (floats.T if transposed else floats).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file({k: v.contiguous() for k, v in packed.items()}, quantized / "model.safetensors")
    return QuantizedCheckpoint(quantized, plain, matrices)


def _is_float(how: Scheme, module: str) -> bool:
    head = how.config.get("lm_head") and module == "lm_head"
    return not head and re.search(how.floats, module) is not None


def _is_8_bit(scheme: str, module: str) -> bool:
    return scheme == "gptq-head-and-rules" and module.endswith("o_proj")
