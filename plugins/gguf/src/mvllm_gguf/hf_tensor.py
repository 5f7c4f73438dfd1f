"""HFTensor: a tensor of the Hugging Face checkpoint, composed of rows of tensors in a GGUF file.

    sources (row numbers)             row_numbers()        the checkpoint's tensor
    ┌──────────────┐ 0                                     ┌──────────────┐
    │ attn_q       │ 1                  [0, 2, 1, 3]       │ row 0        │
    │              │ 2                 ─────────────▶      │ row 2        │
    └──────────────┘ 3                                     │ row 1 ...    │

A row is a row of the file: the values along the last dimension, which are whole blocks. So permutations, slices and
concatenations of rows need no dequantization. Neither do permutations of column groups that consist of whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mvllm_gguf.header import GGUFTensor
from mvllm_gguf.tensor_types import TensorType

Rows = Callable[[], NDArray[np.int64]]
Function = Callable[[NDArray[np.float32]], NDArray[np.float32]]


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
class ColumnGroups:
    """The order of groups of adjacent columns.

    Attributes:
        size: Columns per group.
        numbers: Returns the group number in the file for each group of the checkpoint, int64.
    """

    size: int
    numbers: Rows

    def order(self, size: int) -> NDArray[np.int64]:
        """The position in the file of each element of a row in which a group has `size` elements."""
        return (self.numbers()[:, None] * size + np.arange(size)).reshape(-1)


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
        columns: The order of the columns, if it differs from that in the file.
        function: Applied to all values, float32, after the offset.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    row_numbers: Rows
    transposed: bool = False
    offset: float = 0.0
    columns: ColumnGroups | None = None
    function: Function | None = None

    @property
    def row_length(self) -> int:
        """Number of values per row."""
        return self.sources[0].row_length

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return math.prod(self.shape) // self.row_length

    @property
    def is_changed(self) -> bool:
        """Whether its values are computed from those in the file."""
        return bool(self.offset) or self.function is not None

    @property
    def has_whole_rows(self) -> bool:
        """Whether its rows consist of unchanged blocks of one tensor type in the file, so that these can be used."""
        types = {source.tensor.type for source in self.sources}
        if len(types) > 1 or self.is_changed or any(s.swapped or s.single for s in self.sources):
            return False
        return self.columns is None or self.columns.size % types.pop().block_values == 0

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


def by_group(num_groups: int, first: int, group_rows: int, start: int, count: int) -> Rows:
    """Rows [start, start + count) of each group.

    Args:
        num_groups: Number of groups.
        first: The first row of the first group.
        group_rows: Rows per group.
        start, count: The rows within a group.
    """
    return partial(_by_group, num_groups, first, group_rows, start, count)


def _by_group(num_groups: int, first: int, group_rows: int, start: int, count: int) -> NDArray[np.int64]:
    groups = first + start + group_rows * np.arange(num_groups)
    return (groups[:, None] + np.arange(count)).reshape(-1)


def grouped_heads(num_groups: int, per_group: int, head_size: int, first: int = 0) -> Rows:
    """Rows of heads, all heads of a group adjacent; in the file, first the first head of every group, and so on.

        file         a₀ b₀ a₁ b₁ a₂ b₂
        checkpoint   a₀ a₁ a₂ b₀ b₁ b₂

    Args:
        num_groups: Number of groups, here a and b.
        per_group: Heads per group.
        head_size: Rows per head.
        first: All rows before this one keep their order.
    """
    return partial(_grouped_heads, num_groups, per_group, head_size, first)


def _grouped_heads(num_groups: int, per_group: int, head_size: int, first: int) -> NDArray[np.int64]:
    heads = _reordered((per_group, num_groups, head_size), (1, 0, 2))
    return np.concatenate((np.arange(first), first + heads))


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
