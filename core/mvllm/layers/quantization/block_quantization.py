"""Matrices in the blocks of a checkpoint format, such as GGUF, that stay in them if the platform supports
`block_quantized_linear`.

`quantization_config: {"quant_method": FORMAT, "tensors": {module: block format}}` in the config.json of a derived model
folder lists the quantized matrices. The checkpoint provides each of them in two forms, and this class determines which
one is read:

    <module>.packed_weight    uint8 [rows, row_bytes]    the blocks, for `block_quantized_linear`
    <module>.weight           floats [rows, columns]     dequantized by the checkpoint reader

An expert's module is listed as `<block>.experts.*.<name>` if the matrices of all experts have one type. The matrices of
GPT-OSS are stacked: `<module>.packed_weight` is uint8 [experts, rows, row_bytes], and the floats have no `.weight`.

A tied head reads the blocks of the token embedding. The embedding looks up rows in them if the platform supports it,
else it reads the floats.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.interface import QuantizationMethod
from mvllm.logging import get_logger

logger = get_logger(__name__)

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix

_EXPERT = re.compile(r"\.experts\.\d+\.")


class BlockQuantization(QuantizationMethod):
    """The quantization method of derived model folders.

    Args:
        types: The block format of each quantized module, for instance `Q4_K`, in any case.
    """

    def __init__(self, types: dict[str, str]) -> None:
        self.types = types
        self._packed: set[str] = set()
        self._reported: set[str] = set()  # types of matrices for which it was logged that they are dequantized

    @classmethod
    def from_config(cls, settings: HFConfig) -> BlockQuantization:
        types = settings.get("tensors", {})
        if not isinstance(types, dict) or not all(isinstance(name, str) for name in types.values()):
            raise ModelError(
                f"{settings.source}: 'tensors' should map names of modules to block formats, found {types!r}. Delete "
                "the derived model folder, so that it is made again from the model's file."
            )
        return cls(types)

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        formats = [self.format_of(name) for name in layout.names]
        matrix = None
        if not layout.transposed and ctx.num_devices == 1:
            from mvllm.layers.quantization.block_quantized_matrix import BlockQuantizedMatrix

            matrix = BlockQuantizedMatrix.build(ctx, layout, formats)
        if matrix is not None:
            self._packed.update(layout.names)
        elif found := {name.upper() for name in formats if name} - self._reported:
            self._reported |= found
            logger.info(
                "Matrices in %s, such as %s, are dequantized to %s where the platform does not multiply with their "
                "blocks.",
                *(" and ".join(sorted(found)), layout.names[0], str(ctx.dtype).removeprefix("torch.")),
            )
        return matrix

    def format_of(self, module: str) -> str:
        """The block format of a module's matrix or stack of matrices; empty if it is not listed."""
        kind = self.types.get(module) or self.types.get(_EXPERT.sub(".experts.*.", module))
        return (kind or "").lower()

    def take_stack(self, name: str) -> None:
        """Records that a stack of matrices is read in blocks, not as floats."""
        self._packed.add(name)

    def ignores(self, name: str) -> bool:
        module, _, tensor = name.rpartition(".")
        return name in self._packed or tensor == "packed_weight" or (tensor == "weight" and module in self._packed)
