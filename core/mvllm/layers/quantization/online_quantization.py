"""Online quantization: quantizes an unquantized checkpoint while loading, layer by layer, by rounding to nearest.

`int8`: 8-bit weights with a scale per row; inputs are rounded to int8 with a scale per token. `int4`: 4-bit weights in
groups of 32 columns, each with a scale and a zero point; inputs likewise. Every linear layer is quantized, the head
with 8 bits even if it is tied. The token embedding is not quantized, since a step reads only a few of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mvllm.config.hf_config import HFConfig
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.interface import IntegerFormat, QuantizationMethod

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.rtn_matrix import RTNMatrix


class OnlineQuantization(QuantizationMethod):
    """Rounds weights to the nearest integers.

    Attributes:
        format: Format of all matrices except the head, which has 8 bits and a scale per row.
    """

    quantizes_on_load = True
    format: ClassVar[IntegerFormat]

    @classmethod
    def from_config(cls, settings: HFConfig) -> OnlineQuantization:
        return cls()

    def matrix(self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None) -> RTNMatrix | None:
        from mvllm.layers.quantization.rtn_matrix import RTNMatrix

        format = self.format
        if layout.is_head:
            format = IntegerFormat(8, int8_activations=format.int8_activations)
        return RTNMatrix(ctx, layout, format, tied_to)


class Int8(OnlineQuantization):
    """8-bit weights and inputs."""

    format = IntegerFormat(8, int8_activations=True)


class Int4(OnlineQuantization):
    """4-bit weights in groups, 8-bit inputs."""

    format = IntegerFormat(4, 32, symmetric=False, int8_activations=True)
