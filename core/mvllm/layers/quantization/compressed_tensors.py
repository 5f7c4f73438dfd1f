"""compressed-tensors checkpoints of integers and of FP8.

int-quantized     weight            int8  [out, in]
                  weight_scale      float [out, groups]     one group where the strategy is 'channel'
                  weight_zero_point int8  [out, groups]     unless symmetric
pack-quantized    weight_packed     int32 [out, in / n]     n = 8 or 4 inputs in a word, the first in the lowest bits
                  weight_scale      float [out, groups]
                  weight_zero_point int32 [out / n, groups] outputs in a word
                  weight_g_idx      int32 [in]              with actorder 'group': the group of each input
float-quantized   weight            F8_E4M3 [out, in]
                  weight_scale      float [1], [out, 1], [out, groups] or [out / b0, in / b1], by the strategy
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.config_fields import REMEDY, group_size, names, one_of, pattern
from mvllm.layers.quantization.float8 import block_sizes, float8_matrix, is_activation_scale
from mvllm.layers.quantization.interface import Float8Format, PackedFormat, QuantizationMethod, format_of_all

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix
    from mvllm.ops.float8_linear import Float8Inputs

INTEGERS = "int-quantized"
WORDS = "pack-quantized"
FLOATS = "float-quantized"
_FORMATS = (INTEGERS, WORDS, FLOATS, "naive-quantized")
_SCALE_TENSOR = "weight_scale"
_ORDER_TENSOR = "weight_g_idx"

Matcher = Callable[[str, str], bool]
"""Whether a target matches a module: (name, class)."""


@dataclass(frozen=True)
class ConfigGroup:
    """Modules with a common storage format (`config_groups`).

    Attributes:
        targets: Matches the modules.
        format: Their storage format.
    """

    targets: Matcher
    format: PackedFormat | Float8Format


class CompressedTensors(QuantizationMethod):
    """`quant_method: compressed-tensors`.

    Args:
        groups: The first group that matches a module has its storage format.
        ignore: Matches modules that are not quantized.
    """

    def __init__(self, groups: tuple[ConfigGroup, ...], ignore: Matcher) -> None:
        self.groups, self.ignore = groups, ignore

    @classmethod
    def from_config(cls, settings: HFConfig) -> CompressedTensors:
        for key, what in (
            ("kv_cache_scheme", "a quantized KV cache"),
            ("sparsity_config", "sparse weights"),
            ("transform_config", "transformed weights"),
        ):
            value = settings.get(key)
            is_dense = key == "sparsity_config" and isinstance(value, dict) and value.get("format") == "dense"
            if value and not is_dense:
                raise ModelError(f"{settings.source}: {key!r} asks for {what}, which is not supported. {REMEDY}")
        groups = settings.require("config_groups", dict)
        return cls(
            tuple(_group(_part(settings, "config_groups", name, groups[name]), settings) for name in groups),
            _matcher(names(settings, "ignore"), settings),
        )

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        if layout.tied:
            return None
        kind = "Conv1D" if layout.transposed else "Linear"
        format = format_of_all(layout, [self._format_of(name, kind) for name in layout.names])
        if format is None:
            return None
        if isinstance(format, Float8Format):
            return float8_matrix(ctx, layout, format)
        if layout.transposed:
            raise ModelError(
                f"{layout}: the checkpoint's quantization_config targets it, but a matrix that is stored as [in, out] "
                f"is not supported in compressed-tensors. {REMEDY}"
            )
        from mvllm.layers.quantization.packed_matrix import PackedMatrix
        from mvllm.layers.quantization.packing_formats import IntQuantizedPacking, PackQuantizedPacking

        return PackedMatrix(
            ctx, layout, PackQuantizedPacking() if format.packing == WORDS else IntQuantizedPacking(), format
        )

    def ignores(self, name: str) -> bool:
        """Shape tensors, trivial group indices, and scales of FP8 inputs."""
        return name.endswith((".weight_shape", f".{_ORDER_TENSOR}")) or is_activation_scale(name)

    def _format_of(self, name: str, kind: str) -> PackedFormat | Float8Format | None:
        names = self.names_of(name)
        if any(self.ignore(each, kind) for each in names):
            return None
        return next((group.format for group in self.groups if any(group.targets(each, kind) for each in names)), None)


def _group(group: HFConfig, settings: HFConfig) -> ConfigGroup:
    packing = one_of(group if "format" in group else settings, ("format",), _FORMATS)
    weights = _part(group, "weights", None, group.require("weights", dict))
    kinds = {FLOATS: ("float",), "naive-quantized": ("int", "float")}.get(packing, ("int",))
    if one_of(weights, ("type",), kinds, default=kinds[0]) == "float":
        return ConfigGroup(_matcher(names(group, "targets"), settings), _float8(group, weights))
    strategy = one_of(weights, ("strategy",), ("channel", "group"), default="channel")
    order = one_of(weights, ("actorder",), ("group", "weight", "static", "dynamic"), default="weight")
    size = group_size(weights, ("group_size",)) if strategy == "group" else None
    if strategy == "group" and size is None:
        raise ModelError(f"{weights.source}: the strategy is 'group', but there is no 'group_size'.")
    format = PackedFormat(
        bits=one_of(weights, ("num_bits",), (4, 8) if packing == WORDS else (8,)),
        group_size=size,
        symmetric=one_of(weights, ("symmetric",), (True, False), default=True),
        int8_activations=_int8_activations(group),
        order_tensor=_ORDER_TENSOR if size is not None and order in ("group", "dynamic") else None,
        packing=WORDS if packing == WORDS else INTEGERS,
    )
    return ConfigGroup(_matcher(names(group, "targets"), settings), format)


def _float8(group: HFConfig, weights: HFConfig) -> Float8Format:
    """The FP8 format. Inputs may be rounded to FP8 as well, with dynamic scales per row or one static scale."""
    one_of(weights, ("num_bits",), (8,))
    one_of(weights, ("symmetric",), (True,), default=True)
    inputs: Float8Inputs = "floats"
    if group.get("input_activations"):
        activations = _part(group, "input_activations", None, group.require("input_activations", dict))
        one_of(activations, ("num_bits",), (8,))
        one_of(activations, ("type",), ("float",))
        if activations.get("dynamic", False) is True:
            inputs = "dynamic"
        elif activations.get("strategy", "tensor") == "tensor":
            inputs = "static"
    strategy = one_of(weights, ("strategy",), ("tensor", "channel", "group", "block"), default="tensor")
    if strategy == "block":
        rows, columns = block_sizes(weights, "block_structure")
        return Float8Format(_SCALE_TENSOR, rows, columns, inputs)
    if strategy == "group":
        return Float8Format(_SCALE_TENSOR, 1, weights.positive_int("group_size"), inputs)
    return Float8Format(_SCALE_TENSOR, 1 if strategy == "channel" else None, None, inputs)


def _int8_activations(group: HFConfig) -> bool:
    if group.get("output_activations"):
        raise ModelError(f"{group.source}: 'output_activations' are not supported. {REMEDY}")
    if not group.get("input_activations"):
        return False
    inputs = _part(group, "input_activations", None, group.require("input_activations", dict))
    one_of(inputs, ("num_bits",), (8,))
    one_of(inputs, ("type",), ("int",), default="int")
    one_of(inputs, ("symmetric",), (True,), default=True)
    one_of(inputs, ("dynamic",), (True,), default=False)
    one_of(inputs, ("strategy",), ("token",), default="tensor")
    return True


def _part(outer: HFConfig, key: str, name: str | None, values: Any) -> HFConfig:
    where = f"{outer.source}: {key}" + ("" if name is None else f".{name}")
    if not isinstance(values, dict):
        raise ModelError(f"{where} should be an object, found {values!r}.")
    return HFConfig(values, where)


def _matcher(targets: tuple[str, ...], settings: HFConfig) -> Matcher:
    """Names, class names, and `re:` patterns that match from a name's beginning."""
    expressions: list[re.Pattern[str]] = [pattern(t[3:], settings) for t in targets if t.startswith("re:")]
    return lambda name, kind: name in targets or kind in targets or any(e.match(name) for e in expressions)
