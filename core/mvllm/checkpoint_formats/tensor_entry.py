"""Description of a checkpoint's tensors, and an interface for reading them, independent of the file format."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint. Each format that stores tensors in files has a subclass of its own.

    Attributes:
        name: Its name in the checkpoint.
        file: The file that holds it.
        dtype: As safetensors spells it (`BF16`).
        shape: Sizes of its dimensions; row-major, contiguous.
        start: Position of its first byte in the file. Orders the reads; only the format's own reader uses it otherwise.
        num_bytes: Its size, as `dtype` and `shape` give it: that of the values which the reader returns, whatever the
            file stores.
        transposed: Each matrix is stored as the transpose of that of the family's other checkpoints.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    transposed: bool = False

    def open_reader(self) -> AbstractContextManager[TensorReader]:
        """A reader for tensors of the same checkpoint in the same file. A tensor that is in no file has none."""
        raise NotImplementedError(
            f"{type(self).__name__} defines no open_reader: its tensors cannot be read from a file"
        )


class TensorReader(Protocol):
    """Reads tensor data. One thread uses it at a time.

    Offsets count bytes of the tensor, from 0, not of the file: what is read are values of `dtype` in row-major order.
    Rows are those of the last dimension.
    """

    def read_into(self, target: memoryview, entry: TensorEntry, offset: int) -> None:
        """Fills `target` with the bytes of `entry` from `offset` on: whole rows, or a part of one row.

        Raises:
            ModelError: The file cannot be read, or has become shorter.
        """

    def read_strided(self, target: memoryview, entry: TensorEntry, offset: int, length: int, stride: int) -> None:
        """Fills `target` with pieces of `entry` of `length` bytes, from `offset` on, `stride` bytes apart.

        Pieces are whole rows or the same columns of rows; the size of `target` is a multiple of `length`.

        Raises:
            ModelError: As `read_into`.
        """


def packed_name(weight: str) -> str:
    """The name under which a checkpoint offers a weight as it is stored, in blocks: `x.packed_weight`.

    `x.weight` and a stack of matrices `x`, whose name has no suffix, are named alike.
    """
    return f"{weight.removesuffix('.weight')}.packed_weight"
