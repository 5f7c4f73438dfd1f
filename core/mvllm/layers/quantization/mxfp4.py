"""MXFP4 checkpoints (GPT-OSS): experts in 4-bit floats, groups of 32 with a power-of-two scale; the rest in floats.

blocks  uint8 [..., groups, 16]    two values in a byte, the first in the lower bits: sign, 2 bits of exponent, 1 more
scales  uint8 [..., groups]        the exponent of the group's power of two, plus 127

Experts stay in 4 bits where the platform multiplies with them, as the format `mxfp4` of `block_quantized_linear`.
Otherwise they are dequantized after loading, exactly: two significant bits fit every compute dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mvllm.config.hf_config import HFConfig
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.interface import QuantizationMethod

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix

GROUP_SIZE = 32
"""Values that share a scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


class MXFP4(QuantizationMethod):
    """`quant_method: mxfp4`. It applies to expert layers only (stacked_experts.py)."""

    @classmethod
    def from_config(cls, settings: HFConfig) -> MXFP4:
        return cls()

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        return None


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantizes packed MXFP4 values.

    Args:
        blocks: [rows, groups, 16], uint8.
        scales: [rows, groups], uint8.

    Returns:
        [rows, groups · 32], float32.
    """
    import torch

    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[codes.int()], scales.int().unsqueeze(-1) - _BIAS).flatten(-2)


def as_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed MXFP4 values in the order of the block format `mxfp4`: a block has its scale, and neighbouring bytes hold
    neighbouring values, those of the first half of the block in the low bits.

    Args:
        blocks, scales: As for `dequantize`.

    Returns:
        [rows, groups · 17], uint8.
    """
    import torch

    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    first, second = codes.chunk(2, dim=-1)
    return torch.cat((scales.unsqueeze(-1), first | (second << 4)), dim=-1).flatten(-2)
