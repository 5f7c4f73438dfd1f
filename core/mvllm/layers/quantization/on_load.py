"""Quantizing a checkpoint of floats while it is loaded, layer by layer, by rounding to the nearest.

`int8`: weights of 8 bits, a scale per row; inputs are rounded to int8, a scale per token. `int4`: weights of 4 bits in
groups of 32 columns, each with a scale and a zero point; inputs likewise. Every linear layer is quantized, and the head
with 8 bits, also where it is tied; the token embedding stays as it is: a step reads a few of its rows only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mvllm.config.hf_config import HFConfig
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.interface import QuantizationMethod

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.rounded_matrix import RoundedMatrix


class OnLoad(QuantizationMethod):
    """Rounds weights to the nearest integers.

    Attributes:
        bits: 8 or 4; the head has 8.
        group_size: Columns that share a scale where there are 4 bits; with 8, a row has one.
        symmetric: There are no zero points; with 8 bits there never are.
        int8_activations: Inputs are rounded to int8.
    """

    quantizes_on_load = True
    bits: ClassVar[int]
    group_size: ClassVar[int | None] = None
    symmetric: ClassVar[bool] = True
    int8_activations: ClassVar[bool] = False

    @classmethod
    def of(cls, settings: HFConfig) -> OnLoad:
        return cls()

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> RoundedMatrix | None:
        from mvllm.layers.quantization.rounded_matrix import RoundedMatrix

        rows_of_8_bits = self.bits == 8 or layout.is_head
        return RoundedMatrix(
            ctx,
            layout,
            bits=8 if rows_of_8_bits else self.bits,
            group_size=None if rows_of_8_bits else self.group_size,
            symmetric=rows_of_8_bits or self.symmetric,
            int8_activations=self.int8_activations,
            tied_to=tied_to,
        )


class Int8(OnLoad):
    """8-bit weights and inputs."""

    bits = 8
    int8_activations = True


class Int4(OnLoad):
    """4-bit weights in groups, 8-bit inputs."""

    bits = 4
    group_size = 32
    symmetric = False
    int8_activations = True
