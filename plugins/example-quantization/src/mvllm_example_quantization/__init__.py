"""Example quantization method: ternary weights (-s, 0 or +s, with one scale s per row).

A checkpoint asks for it with `"quantization_config": {"quant_method": "ternary", "ignore": ["lm_head"]}`; each matrix
`x` that is not ignored is stored as

    x.ternary   uint8 [out, in / 4]    four columns in a byte, the first in the lowest bits: 0 for -1, 1 for 0, 2 for +1
    x.scale     float [out]

    python -m mvllm_example_quantization.checkpoint FOLDER TERNARY_FOLDER       makes one out of a plain checkpoint

This module is imported before any process is started, to hear what it says of the settings: without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mvllm.extension_api import ModelError, QuantizationMethod

if TYPE_CHECKING:
    from torch import nn

    from mvllm.extension_api import BuildContext, HFConfig, MatrixLayout, QuantizedMatrix


class Ternary(QuantizationMethod):
    """`quant_method: ternary`.

    Args:
        ignore: Modules that are not quantized.
    """

    def __init__(self, ignore: tuple[str, ...]) -> None:
        self.ignore = ignore

    @classmethod
    def from_config(cls, settings: HFConfig) -> Ternary:
        ignore = settings.get("ignore", [])
        if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
            raise ModelError(f"{settings.source}: 'ignore' should be a list of module names, found {ignore!r}.")
        return cls(tuple(ignore))

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        if layout.tied or all(name in self.ignore for name in layout.names):
            return None
        from mvllm_example_quantization.matrix import TernaryMatrix

        return TernaryMatrix(ctx, layout)
