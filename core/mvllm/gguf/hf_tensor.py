"""HFTensor: a tensor of the Hugging Face checkpoint, composed of rows of tensors in a GGUF file.

    sources (row numbers)             row_numbers()        the checkpoint's tensor
    ┌──────────────┐ 0                                     ┌──────────────┐
    │ attn_q       │ 1                  [0, 2, 1, 3]       │ row 0        │
    │              │ 2                 ─────────────▶      │ row 2        │
    └──────────────┘ 3                                     │ row 1 ...    │

A row is a row of the file: the values along the last dimension, which are whole blocks. So permutations, slices and
concatenations of rows need no dequantization.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mvllm.gguf.header import GGUFTensor
from mvllm.gguf.tensor_types import TensorType

Rows = Callable[[], NDArray[np.int64]]


@dataclass(frozen=True)
class Source:
    """The rows of a tensor in the file.

    Attributes:
        tensor: The tensor.
        swapped: Whether rows are those of each matrix's transpose, that is, columns in the file.
        single: Whether each value is a row. Only for unquantized tensors.
    """

    tensor: GGUFTensor
    swapped: bool = False
    single: bool = False

    @property
    def row_length(self) -> int:
        """Number of values per row."""
        return 1 if self.single else self.tensor.shape[-2 if self.swapped else -1]

    @property
    def num_rows(self) -> int:
        """Number of rows of all matrices."""
        return math.prod(self.tensor.shape) // self.row_length


@dataclass(frozen=True)
class HFTensor:
    """A tensor with the name and shape of the Hugging Face checkpoint.

    Attributes:
        name: Its name in the checkpoint.
        shape: Its shape as stored.
        sources: The tensors with its rows; all have the same row length.
        row_numbers: Returns the row number in the concatenated `sources` for each of its rows, [rows], int64.
        transposed: Whether the last two dimensions of `shape` are swapped in the checkpoint.
        offset: Added to each value.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    row_numbers: Rows
    transposed: bool = False
    offset: float = 0.0

    @property
    def row_length(self) -> int:
        """Number of values per row."""
        return self.sources[0].row_length

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return math.prod(self.shape) // self.row_length

    @property
    def has_whole_rows(self) -> bool:
        """Whether its rows are unchanged rows of one tensor type in the file, so that packed rows can be used."""
        types = {source.tensor.type for source in self.sources}
        return len(types) == 1 and not self.offset and not any(s.swapped or s.single for s in self.sources)

    @property
    def packed_type(self) -> TensorType | None:
        """The type of a matrix, or stack of matrices, whose blocks can be used without conversion; None for others."""
        kind = self.sources[0].tensor.type
        is_matrix = len(self.shape) == 3 or (self.name.endswith(".weight") and len(self.shape) == 2)
        return kind if is_matrix and kind.is_quantized and self.has_whole_rows else None


def in_order(count: int, first: int = 0) -> Rows:
    """Rows [first, first + count) in the order of the file."""
    return partial(np.arange, first, first + count)


def rotary_halves(num_heads: int, head_size: int, first: int = 0) -> Rows:
    """Rows of heads with RoPE in the rotate-half layout; in the file, the two rows of each rotary pair are adjacent.

        file         a₀ b₀ a₁ b₁ a₂ b₂
        checkpoint   a₀ a₁ a₂ b₀ b₁ b₂

    Args:
        num_heads: Number of heads.
        head_size: Rows per head, an even number.
        first: The first row.
    """
    return partial(_rotary_halves, num_heads, head_size, first)


def _rotary_halves(num_heads: int, head_size: int, first: int) -> NDArray[np.int64]:
    rows = np.arange(num_heads * head_size).reshape(num_heads, head_size // 2, 2)
    return first + rows.swapaxes(1, 2).reshape(-1)


def interleaved(num_matrices: int, num_rows: int) -> Rows:
    """Rows of two stacks of matrices, alternating.

    Args:
        num_matrices: Matrices per stack.
        num_rows: Rows per matrix.
    """
    return partial(_reordered, (2, num_matrices, num_rows), (1, 2, 0))


def _reordered(shape: tuple[int, ...], axes: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(math.prod(shape)).reshape(shape).transpose(axes).reshape(-1)


def joined_by_group(num_groups: int, *sizes: int) -> Rows:
    """Rows of several tensors, concatenated per group.

    Args:
        num_groups: Groups per tensor.
        *sizes: Rows per group of each tensor.
    """
    return partial(_joined_by_group, num_groups, sizes)


def _joined_by_group(num_groups: int, sizes: tuple[int, ...]) -> NDArray[np.int64]:
    starts = np.cumsum([0, *(num_groups * size for size in sizes)])
    parts = [
        start + np.arange(num_groups * size).reshape(num_groups, size)
        for start, size in zip(starts, sizes, strict=False)
    ]
    return np.concatenate(parts, axis=1).reshape(-1)
