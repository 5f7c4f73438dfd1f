"""HFTensor: a tensor of the Hugging Face checkpoint, put together from rows of the tensors in a GGUF file.

    sources, rows counted through     row_numbers()        the checkpoint's tensor
    ┌──────────────┐ 0                                     ┌──────────────┐
    │ attn_q       │ 1                  [0, 2, 1, 3]       │ row 0        │
    │              │ 2                 ─────────────▶      │ row 2        │
    └──────────────┘ 3                                     │ row 1 ...    │

A row is what the file stores as one: values that are adjacent in the last dimension, in whole blocks. So a permutation,
a slice or a concatenation of rows needs no dequantization.
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
    """A tensor of the file as a list of rows.

    Attributes:
        tensor: The tensor.
        swapped: The rows are those of the transpose of each matrix: columns in the file.
        single: Each value is a row. Only for tensors that are not quantized.
    """

    tensor: GGUFTensor
    swapped: bool = False
    single: bool = False

    @property
    def row_length(self) -> int:
        """Values of a row."""
        return 1 if self.single else self.tensor.shape[-2 if self.swapped else -1]

    @property
    def num_rows(self) -> int:
        """Rows of all matrices together."""
        return math.prod(self.tensor.shape) // self.row_length


@dataclass(frozen=True)
class HFTensor:
    """A tensor with the name and shape of the Hugging Face checkpoint.

    Attributes:
        name: Its name in the checkpoint.
        shape: Its sizes.
        sources: The tensors whose rows it consists of; all have the same row length.
        row_numbers: Makes the number of the row in `sources` of each of its rows, [rows], int64.
        transposed: `shape` is as stored; the checkpoint has the last two dimensions of it swapped.
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
        """Values of a row."""
        return self.sources[0].row_length

    @property
    def num_rows(self) -> int:
        """Rows of the tensor."""
        return math.prod(self.shape) // self.row_length

    @property
    def has_whole_rows(self) -> bool:
        """Whether its rows are stored rows of one type without change, so that they can be used in packed form."""
        types = {source.tensor.type for source in self.sources}
        return len(types) == 1 and not self.offset and not any(s.swapped or s.single for s in self.sources)

    @property
    def packed_type(self) -> TensorType | None:
        """The type of a matrix, or stack of them, whose stored blocks can be used as they are; None for others."""
        kind = self.sources[0].tensor.type
        is_matrix = len(self.shape) == 3 or (self.name.endswith(".weight") and len(self.shape) == 2)
        return kind if is_matrix and kind.is_quantized and self.has_whole_rows else None


def in_order(count: int, first: int = 0) -> Rows:
    """`count` rows in the order of the file, from `first` on."""
    return partial(np.arange, first, first + count)


def rotary_halves(num_heads: int, head_size: int, first: int = 0) -> Rows:
    """The rows of rotary heads with the two elements of each pair half a head apart, where the file has them adjacent.

        file         a₀ b₀ a₁ b₁ a₂ b₂
        checkpoint   a₀ a₁ a₂ b₀ b₁ b₂

    Args:
        num_heads, head_size: Heads and their rows, an even number.
        first: The first row.
    """
    return partial(_rotary_halves, num_heads, head_size, first)


def _rotary_halves(num_heads: int, head_size: int, first: int) -> NDArray[np.int64]:
    rows = np.arange(num_heads * head_size).reshape(num_heads, head_size // 2, 2)
    return first + rows.swapaxes(1, 2).reshape(-1)


def interleaved(num_matrices: int, num_rows: int) -> Rows:
    """Rows of two stacks of matrices in turn.

    Args:
        num_matrices: Matrices of each stack.
        num_rows: Rows of each matrix.
    """
    return partial(_reordered, (2, num_matrices, num_rows), (1, 2, 0))


def _reordered(shape: tuple[int, ...], axes: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(math.prod(shape)).reshape(shape).transpose(axes).reshape(-1)


def joined_by_group(num_groups: int, *sizes: int) -> Rows:
    """Rows of several tensors, group by group.

    Args:
        num_groups: Groups of each tensor.
        *sizes: Rows of a group in each tensor.
    """
    return partial(_joined_by_group, num_groups, sizes)


def _joined_by_group(num_groups: int, sizes: tuple[int, ...]) -> NDArray[np.int64]:
    starts = np.cumsum([0, *(num_groups * size for size in sizes)])
    parts = [
        start + np.arange(num_groups * size).reshape(num_groups, size)
        for start, size in zip(starts, sizes, strict=False)
    ]
    return np.concatenate(parts, axis=1).reshape(-1)
