"""FP8 (E4M3) checkpoints: one byte per weight, multiplied by scales.

fp8          weight            F8_E4M3 [out, in]
             weight_scale_inv  float [out / b0, in / b1]     with a `weight_block_size` of [b0, b1] (DeepSeek, Qwen3)
             weight_scale      float []                      without: one for the matrix (or as weight_scale_inv)
fbgemm_fp8   weight_scale      float [out, 1]

Weights are multiplied by `weight_scale_inv`, in spite of its name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.config_fields import REMEDY, names, one_of
from mvllm.layers.quantization.interface import Float8Format, QuantizationMethod, format_of_all

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix

_SCALE_OF_ALL, _SCALE_OF_BLOCKS = "weight_scale", "weight_scale_inv"
_ACTIVATIONS = (".input_scale", ".activation_scale", ".input_scale_ub", ".output_scale")


class Float8(QuantizationMethod):
    """`quant_method: fp8`.

    Args:
        format: Storage format of the quantized matrices.
        floats: Modules that are not quantized, with their submodules.
    """

    def __init__(self, format: Float8Format, floats: tuple[str, ...]) -> None:
        self.format, self.floats = format, floats

    @classmethod
    def from_config(cls, settings: HFConfig) -> Float8:
        one_of(settings, ("fmt",), ("e4m3",), default="e4m3", fold=True)
        inputs = one_of(settings, ("activation_scheme",), ("dynamic", "static"), default="dynamic", fold=True)
        one_of(settings, ("expert_dtype",), ("fp8",), default="fp8", fold=True)
        format = replace(_blocks(settings), inputs=inputs)
        return cls(format, (*names(settings, "modules_to_not_convert"), *names(settings, "ignored_layers")))

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        format = None if layout.is_head else format_of_all(layout, [self._format_of(name) for name in layout.names])
        if format is None:
            return None
        return float8_matrix(ctx, layout, format)

    def ignores(self, name: str) -> bool:
        """Scales of activations that are not used."""
        return is_activation_scale(name)

    def given_name(self, name: str) -> str:
        """Maps both names of a scale for the whole matrix to one."""
        if self.format.is_whole and name.endswith(f".{_SCALE_OF_BLOCKS}"):
            return name.removesuffix(_SCALE_OF_BLOCKS) + _SCALE_OF_ALL
        return name

    def _format_of(self, name: str) -> Float8Format | None:
        names, parts = self.names_of(name), [f".{part.strip('.')}." for part in self.floats]
        return None if any(part in f".{each}." for each in names for part in parts) else self.format


class RowwiseFloat8(Float8):
    """`quant_method: fbgemm_fp8`: a scale per row. `activation_scale_ub` is ignored."""

    format_of_rows: ClassVar[Float8Format] = Float8Format(_SCALE_OF_ALL, block_rows=1, inputs="dynamic")

    @classmethod
    def from_config(cls, settings: HFConfig) -> RowwiseFloat8:
        return cls(cls.format_of_rows, names(settings, "modules_to_not_convert"))


def float8_matrix(ctx: BuildContext, layout: MatrixLayout, format: Float8Format) -> QuantizedMatrix:
    """The Float8Matrix of a layer.

    Raises:
        ModelError: The checkpoint stores it as [in, out], which is not supported.
    """
    if layout.transposed:
        raise ModelError(
            f"{layout}: the checkpoint's quantization_config targets it, but a matrix that is stored as [in, out] is "
            f"not supported in FP8. {REMEDY}"
        )
    from mvllm.layers.quantization.float8_matrix import Float8Matrix

    return Float8Matrix(ctx, layout, format)


def is_activation_scale(name: str) -> bool:
    """Whether a tensor is a scale of a layer's inputs or outputs."""
    return name.endswith(_ACTIVATIONS)


def block_sizes(settings: HFConfig, key: str) -> tuple[int, int]:
    """Rows and columns of a block.

    Raises:
        ModelError: They are not two positive integers.
    """
    value = settings.require(key)
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(v) is int and v > 0 for v in value):
        raise ModelError(f"{settings.source}: {key!r} should be two integers > 0, found {value!r}.")
    return value[0], value[1]


def _blocks(settings: HFConfig) -> Float8Format:
    if "weight_block_size" not in settings:
        return Float8Format(_SCALE_OF_ALL)
    rows, columns = block_sizes(settings, "weight_block_size")
    return Float8Format(_SCALE_OF_BLOCKS, rows, columns)
