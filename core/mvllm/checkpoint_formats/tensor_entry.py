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
        start: Position of its first byte in the file.
        num_bytes: Its size.
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
        raise NotImplementedError(f"{type(self).__name__} has no file to read from")


class TensorReader(Protocol):
    """Reads tensor data. One thread uses it at a time."""

    def read_into(self, target: memoryview, entry: TensorEntry, offset: int) -> None:
        """Fills `target` with the bytes of `entry` from `offset` on.

        Raises:
            ModelError: The file cannot be read, or has become shorter.
        """

    def read_strided(self, target: memoryview, entry: TensorEntry, offset: int, length: int, stride: int) -> None:
        """Fills `target` with pieces of `entry` of `length` bytes, from `offset` on, `stride` bytes apart."""


def packed_name(weight: str) -> str:
    """The name under which a checkpoint offers a weight as it is stored, in blocks: `x.packed_weight`.

    `x.weight` and a stack of matrices `x`, whose name has no suffix, are named alike.
    """
    return f"{weight.removesuffix('.weight')}.packed_weight"
