"""AWQ checkpoints: 4 bits in groups, zero points, packed along the outputs in the order of its matrix kernel.

qweight  int32 [in, out / 8]        within a word, the lowest bits first: outputs 0 2 4 6 1 3 5 7
qzeros   int32 [groups, out / 8]    likewise
scales   float [groups, out]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.config_fields import group_size, names, one_of
from mvllm.layers.quantization.interface import PackedFormat, QuantizationMethod, format_of_all

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix


class AWQ(QuantizationMethod):
    """`quant_method: awq`.

    Args:
        format: Storage format of the quantized matrices.
        floats: A module whose name contains one of these is not quantized.
    """

    def __init__(self, format: PackedFormat, floats: tuple[str, ...]) -> None:
        self.format, self.floats = format, floats

    @classmethod
    def from_config(cls, settings: HFConfig) -> AWQ:
        one_of(settings, ("bits", "w_bit"), (4,))
        one_of(settings, ("version",), ("gemm",), default="gemm", fold=True)
        if settings.get("zero_point", True) is not True:
            raise ModelError(f"{settings.source}: 'zero_point' is false, but AWQ is supported with zero points only.")
        size = group_size(settings, ("group_size", "q_group_size"))
        return cls(PackedFormat(4, size, symmetric=False), names(settings, "modules_to_not_convert"))

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        format = None if layout.is_head else format_of_all(layout, [self._format_of(name) for name in layout.names])
        if format is None:
            return None
        from mvllm.layers.quantization.packed_matrix import PackedMatrix
        from mvllm.layers.quantization.packing_formats import AWQPacking

        return PackedMatrix(ctx, layout, AWQPacking(), format)

    def _format_of(self, name: str) -> PackedFormat | None:
        return None if any(part in each for each in self.names_of(name) for part in self.floats) else self.format
