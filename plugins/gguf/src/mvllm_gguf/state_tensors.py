"""StateTensors: maps the tensors of layers that keep a state to those of the Hugging Face checkpoint.

    in the file             in the checkpoint                           architectures
    ssm_a     -exp(x)       A_log: x                                    all but lfm2 and lfm2moe
    ssm_norm  [g, n / g]    norm.weight [n]                             those with Mamba-2
    *conv*    [c, k]        [c, 1, k]                                   all
    attn_qkv, attn_gate     in_proj_qkv, in_proj_z                      qwen3next, qwen35, qwen35moe
    ssm_in                  rows of q, k, v and z of each key head      qwen3next, old files
    ssm_ba                  rows of b and a of each key head            qwen3next
    heads of v              of the same key head adjacent               qwen35, qwen35moe

The last means rows of v, z, b, a, of A_log, dt_bias and the convolution, and columns of the output projection. In the
file the first value heads of all key heads come first, then the second ones, and so on.

Source: convert_hf_to_gguf.py of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvllm.extension_api import ModelError
from mvllm_gguf.header import GGUFTensor
from mvllm_gguf.hf_tensor import ColumnGroups, Function, HFTensor, Rows, Source, by_group, grouped_heads, in_order
from mvllm_gguf.metadata import Metadata

_MIXERS = {
    "falcon-h1": "mamba",
    "granitehybrid": "mamba",
    "kimi-linear": "self_attn",
    "mamba2": "mixer",
    "nemotron_h": "mixer",
    "nemotron_h_moe": "mixer",
    "qwen35": "linear_attn",
    "qwen35moe": "linear_attn",
    "qwen3next": "linear_attn",
}
"""The module of a layer with a state."""
_MATRICES = {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ssm_in": "in_proj",
    "ssm_out": "out_proj",
    "ssm_f_a": "f_a_proj",
    "ssm_f_b": "f_b_proj",
    "ssm_g_a": "g_a_proj",
    "ssm_g_b": "g_b_proj",
}
_CONVOLUTIONS = {
    "shortconv.conv": "conv.conv",
    "ssm_conv1d": "conv1d",
    **{f"ssm_conv1d_{letter}": f"{letter}_conv1d" for letter in "qkv"},
}
_VECTORS = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt": "dt_bias"}
_TILED_HEADS = ("qwen35", "qwen35moe")
_DELTA_NETS = ("qwen3next", *_TILED_HEADS)


class StateTensors:
    """Maps the state layers' tensors of one model.

    Args:
        values: The file's metadata.
        config: `config.json`.
        prefix: Names of layers without their numbers: `model.layers.`.
    """

    def __init__(self, values: Metadata, config: Mapping[str, Any], prefix: str) -> None:
        self._values, self._config, self._prefix = values, config, prefix
        self._arch = values.architecture
        self._is_delta_net = self._arch in _DELTA_NETS
        if self._is_delta_net:
            self._key_heads = int(config["linear_num_key_heads"])
            self._per_key_head = int(config["linear_num_value_heads"]) // self._key_heads
            self._key_dim, self._value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])

    def has(self, layer: int, base: str) -> bool:
        """Whether `tensors` maps the tensor `base` of a layer."""
        if base.startswith("shortconv."):
            return self._arch.startswith("lfm2")
        if self._arch not in _MIXERS:
            return False
        if base in ("attn_qkv", "attn_gate"):
            return self._is_delta_net and self._values.has_tensor(f"blk.{layer}.ssm_out.weight")
        return base.startswith("ssm_")

    def tensors(self, tensor: GGUFTensor, layer: int, base: str, suffix: str) -> Iterator[HFTensor]:
        """The checkpoint's tensors that consist of `tensor`.

        Args:
            tensor: A tensor of the file.
            layer: The layer's number.
            base, suffix: Its name without the layer, `ssm_in` and `weight`. The suffix may be empty.

        Raises:
            ModelError: Its shape or type does not match the metadata.
        """
        mixer = _MIXERS.get(self._arch)
        name = f"{self._prefix}{layer}." + (f"{mixer}." if mixer else "")
        if base in _VECTORS:
            yield self._vector(f"{name}{_VECTORS[base]}", tensor, base)
        elif base == "ssm_norm":
            norm = "o_norm" if self._arch == "kimi-linear" else "norm"
            yield self._values_of(f"{name}{norm}.{suffix}", tensor, (math.prod(tensor.shape),))
        elif base in _CONVOLUTIONS:
            yield self._convolution(f"{name}{_CONVOLUTIONS[base]}.{suffix}", tensor, suffix)
        elif self._is_delta_net:
            yield from self._delta_net(name, tensor, base, suffix)
        elif base == "ssm_beta":
            yield self._matrix(f"{name}b_proj.{suffix}", tensor)
        elif base in _MATRICES:
            yield self._matrix(f"{name}{_MATRICES[base]}.{suffix}", tensor)
        else:
            yield self._matrix(tensor.name, tensor)

    # -------------------------------------------------------------------------------------------- vectors, convolutions

    def _vector(self, name: str, tensor: GGUFTensor, base: str) -> HFTensor:
        count = math.prod(tensor.shape)
        rows: Rows | None = None
        if self._arch in _TILED_HEADS:
            rows = grouped_heads(self._key_heads, self._checked_group(tensor, count), 1)
        is_kimi_decay = self._arch == "kimi-linear" and base == "ssm_a"
        shape = (1, 1, count, 1) if is_kimi_decay else (count,)
        return self._values_of(name, tensor, shape, rows, _log_of_negative if base == "ssm_a" else None)

    def _values_of(
        self,
        name: str,
        tensor: GGUFTensor,
        shape: tuple[int, ...],
        rows: Rows | None = None,
        function: Function | None = None,
    ) -> HFTensor:
        """A tensor of another shape, whose values can be read one by one."""
        if tensor.type.is_quantized:
            raise self._wrong_shape(tensor, "a type that is not quantized")
        source = Source(tensor, single=True)
        return HFTensor(name, shape, (source,), rows or in_order(source.num_rows), function=function)

    def _convolution(self, name: str, tensor: GGUFTensor, suffix: str) -> HFTensor:
        if suffix == "bias":
            return self._values_of(name, tensor, (math.prod(tensor.shape),))
        source = Source(tensor)
        count = source.num_rows
        rows = in_order(count)
        if self._arch in _TILED_HEADS:
            before = 2 * self._key_heads * self._key_dim
            self._checked_group(tensor, (count - before) / self._value_dim)
            rows = grouped_heads(self._key_heads, self._per_key_head, self._value_dim, before)
        return HFTensor(name, (count, 1, source.row_length), (source,), rows)

    # ------------------------------------------------------------------------------------------------------ delta rules

    def _delta_net(self, name: str, tensor: GGUFTensor, base: str, suffix: str) -> Iterator[HFTensor]:
        heads, per_head, size = self._key_heads, self._per_key_head, self._value_dim
        if base == "ssm_out":
            columns = None
            if self._arch in _TILED_HEADS and per_head > 1:
                self._checked_group(tensor, tensor.shape[-1] / size)
                columns = ColumnGroups(size, grouped_heads(heads, per_head, 1))
            yield self._matrix(f"{name}out_proj.{suffix}", tensor, columns=columns)
        elif base == "ssm_in":
            yield from self._by_group(name, tensor, {"in_proj_qkv": ("q", "k", "v"), "in_proj_z": ("z",)})
        elif base == "ssm_ba":
            yield from self._by_group(name, tensor, {"in_proj_b": ("b",), "in_proj_a": ("a",)})
        elif base in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"):
            before = 2 * heads * self._key_dim if base == "attn_qkv" else 0
            rows_per_head = size if base.startswith("attn") else 1
            self._checked_group(tensor, (tensor.shape[0] - before) / rows_per_head)
            tiled = self._arch in _TILED_HEADS and per_head > 1
            rows = grouped_heads(heads, per_head, rows_per_head, before) if tiled else None
            module = {"attn_qkv": "qkv", "attn_gate": "z", "ssm_alpha": "a", "ssm_beta": "b"}[base]
            yield self._matrix(f"{name}in_proj_{module}.{suffix}", tensor, rows)
        else:
            yield self._matrix(tensor.name, tensor)

    def _by_group(self, name: str, tensor: GGUFTensor, modules: Mapping[str, tuple[str, ...]]) -> Iterator[HFTensor]:
        """Matrices whose rows of one key head are adjacent in the file: of all projections, one after the other."""
        value_rows = self._per_key_head * self._value_dim
        sizes = {"q": self._key_dim, "k": self._key_dim, "v": value_rows, "z": value_rows}
        sizes |= {"b": self._per_key_head, "a": self._per_key_head}
        stacked = [projection for projections in modules.values() for projection in projections]
        in_group = sum(sizes[each] for each in stacked)
        if len(tensor.shape) != 2 or tensor.shape[0] != self._key_heads * in_group:
            raise self._wrong_shape(tensor, f"{self._key_heads * in_group} rows")
        start = 0
        for module, projections in modules.items():
            parts: list[Rows] = []
            for each in projections:
                parts.append(by_group(self._key_heads, 0, in_group, start, sizes[each]))
                start += sizes[each]
            count = self._key_heads * sum(sizes[each] for each in projections)
            yield HFTensor(f"{name}{module}.weight", (count, tensor.shape[1]), (Source(tensor),), _Joined(tuple(parts)))

    # --------------------------------------------------------------------------------------------------------- helpers

    def _matrix(
        self, name: str, tensor: GGUFTensor, rows: Rows | None = None, columns: ColumnGroups | None = None
    ) -> HFTensor:
        source = Source(tensor)
        return HFTensor(name, tensor.shape, (source,), rows or in_order(source.num_rows), columns=columns)

    def _checked_group(self, tensor: GGUFTensor, num_value_heads: float) -> int:
        """Value heads per key head; checks that the tensor has all value heads."""
        if num_value_heads != self._key_heads * self._per_key_head:
            raise self._wrong_shape(tensor, f"{self._key_heads * self._per_key_head} value heads")
        return self._per_key_head

    def _wrong_shape(self, tensor: GGUFTensor, expected: str) -> ModelError:
        return self._values.error(
            f"has tensor {tensor.name!r} as {tensor.type} of shape {list(tensor.shape)}, expected {expected}"
        )


class _Joined:
    """Several ranges of rows, one after the other."""

    def __init__(self, parts: tuple[Rows, ...]) -> None:
        self._parts = parts

    def __call__(self) -> NDArray[np.int64]:
        return np.concatenate([part() for part in self._parts])


def _log_of_negative(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The inverse of -exp(x)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(-values)
