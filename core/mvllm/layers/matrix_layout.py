"""MatrixLayout: the parts of checkpoint matrices that form a linear layer's matrix on this rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """This rank's rows of one checkpoint matrix.

    Attributes:
        name: The checkpoint module; `.weight` and `.bias` are appended.
        num_rows: Rows (output features) of the whole checkpoint matrix.
        source: The rows read.
        destination: The rows of this rank's matrix to which they are copied.
    """

    name: str
    num_rows: int
    source: slice
    destination: slice


@dataclass(frozen=True)
class MatrixLayout:
    """A matrix [out_features, num_columns] on this rank: stacked rows of checkpoint matrices.

    Attributes:
        parts: The stacked row ranges.
        in_features: Columns of the whole checkpoint matrices.
        columns: The columns that this rank holds.
        out_features: Rows on this rank; rows without a part are zero.
        bias: Whether the layer has a bias.
        transposed: The checkpoint stores matrices as [in, out].
        is_head: It is the language-model head.
        tied: The head is tied: the checkpoint stores it under the embedding's name only.
        partition: The dimension along which the devices of this worker shard it, if it has several; None if each
            device holds all of it.
        is_expert: Whether it belongs to one of several experts, which their layer computes in one operation.
    """

    parts: tuple[Part, ...]
    in_features: int
    columns: slice
    out_features: int
    bias: bool = False
    transposed: bool = False
    is_head: bool = False
    tied: bool = False
    partition: int | None = None
    is_expert: bool = False

    @property
    def num_columns(self) -> int:
        """Columns (input features) on this rank."""
        return int(self.columns.stop - self.columns.start)

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint modules, in the order of the rows."""
        return tuple(part.name for part in self.parts)

    def __str__(self) -> str:
        return ", ".join(self.names)
