"""The tensor types of GGUF files: numbers, names and block sizes.

Every type stores a row as blocks of equal size: `block_values` values in `block_bytes` bytes. Numbers and sizes are
those of `ggml_type` in ggml.
"""

from __future__ import annotations

from dataclasses import dataclass

from mvllm.extension_api import ModelError


@dataclass(frozen=True)
class TensorType:
    """One tensor type.

    Attributes:
        number: Its number in the file.
        name: Its usual name, for instance `Q4_K`.
        block_values: Values per block; 1 for unquantized types.
        block_bytes: Bytes of a block.
    """

    number: int
    name: str
    block_values: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether the values are quantized in blocks."""
        return self.block_values > 1

    def num_bytes(self, columns: int) -> int:
        """Bytes of a row with `columns` values, a multiple of `block_values`."""
        return columns // self.block_values * self.block_bytes

    def __str__(self) -> str:
        return self.name


TENSOR_TYPES: dict[int, TensorType] = {
    each.number: each
    for each in (
        TensorType(0, "F32", 1, 4),
        TensorType(1, "F16", 1, 2),
        TensorType(2, "Q4_0", 32, 18),
        TensorType(3, "Q4_1", 32, 20),
        TensorType(6, "Q5_0", 32, 22),
        TensorType(7, "Q5_1", 32, 24),
        TensorType(8, "Q8_0", 32, 34),
        TensorType(10, "Q2_K", 256, 84),
        TensorType(11, "Q3_K", 256, 110),
        TensorType(12, "Q4_K", 256, 144),
        TensorType(13, "Q5_K", 256, 176),
        TensorType(14, "Q6_K", 256, 210),
        TensorType(20, "IQ4_NL", 32, 18),
        TensorType(23, "IQ4_XS", 256, 136),
        TensorType(30, "BF16", 1, 2),
        TensorType(39, "MXFP4", 32, 17),
    )
}
"""Supported types by number."""

_UNSUPPORTED = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}


def tensor_type(number: int, where: str) -> TensorType:
    """The type with a number.

    Args:
        where: File and tensor, for the message.

    Raises:
        ModelError: It is not supported.
    """
    found = TENSOR_TYPES.get(number)
    if found is None:
        name = f"{_UNSUPPORTED[number]} ({number})" if number in _UNSUPPORTED else f"number {number}"
        raise ModelError(
            f"{where} has the tensor type {name}, which is not supported. Supported: "
            f"{', '.join(each.name for each in TENSOR_TYPES.values())}. Take a file of the same model in one of these."
        )
    return found
