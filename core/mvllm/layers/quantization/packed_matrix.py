"""PackedMatrix: a matrix that the checkpoint stores as packed integers.

    checkpoint words (int32, 8 or 4 values each)      this rank's matrix (int8)
    ┌───────────────────────┐                         ┌──────────────┐
    │  ┌─────────────┐      │   read: whole words,    │  part 1      │   boundary words of a shard may contain values
    │  │ covering    │      │   then unpacked and     ├──────────────┤   of adjacent shards, which are unpacked as well
    │  └─────────────┘      │   trimmed               │  part 2      │   and dropped
    └───────────────────────┘                         └──────────────┘

A `Packing` defines which tensors a part has and how they are unpacked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mvllm.errors import ConfigError, ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.matrix_layout import MatrixLayout, Part
from mvllm.layers.quantization.interface import PackedFormat
from mvllm.layers.quantization.quantized_matrix import ExpertFacts, IntegerMatrix, staging
from mvllm.layers.weight_target import WeightTarget, whole
from mvllm.ops.quantized_linear import QuantizedWeight


@dataclass(frozen=True)
class MatrixShard:
    """This rank's rows and columns of one checkpoint matrix.

    Attributes:
        num_rows, num_columns, num_groups: Sizes of the whole matrix, and number of scales per row.
        rows, columns, groups: This rank's ranges.
        bits: Bits of a value.
    """

    num_rows: int
    num_columns: int
    num_groups: int
    rows: slice
    columns: slice
    groups: slice
    bits: int

    @property
    def per_word(self) -> int:
        """Values per 32-bit word."""
        return 32 // self.bits

    @property
    def middle(self) -> int:
        """The offset of stored values, which are unsigned."""
        return 1 << (self.bits - 1)

    def words(self, size: int) -> int:
        """Words that hold `size` values."""
        return -(-size // self.per_word)

    def covering(self, band: slice) -> slice:
        """The range of words that contain a range of values."""
        return slice(band.start // self.per_word, self.words(band.stop))

    def trim(self, values: torch.Tensor, band: slice, dim: int) -> torch.Tensor:
        """The values of a range, from the unpacked values of the words that contain it."""
        return values.narrow(dim, band.start % self.per_word, band.stop - band.start)


@dataclass(frozen=True)
class CheckpointPart:
    """One tensor of a checkpoint module.

    Attributes:
        shape: Shape of the whole tensor.
        source: The slices that this rank reads.
        dtype: Its dtype; float tensors are converted to it.
    """

    shape: tuple[int, ...]
    source: tuple[slice, ...]
    dtype: torch.dtype


class Packing(ABC):
    """A packing format of quantized matrices."""

    @abstractmethod
    def tensors(self, share: MatrixShard, *, symmetric: bool) -> Mapping[str, CheckpointPart]:
        """The tensors of a module, by name suffix."""

    @abstractmethod
    def values(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[rows, columns], int8, from the read parts of `tensors`."""

    @abstractmethod
    def scales(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[rows, groups], float32."""

    @abstractmethod
    def zero_points(self, share: MatrixShard, read: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """[rows, groups], int8; None if there are none."""


class PackedMatrix(IntegerMatrix):
    """Stages the checkpoint's packed tensors on the host.

    Args:
        ctx, layout: As in IntegerMatrix.
        packing: The packing of the tensors.
        how: Their format.
    """

    def __init__(self, ctx: BuildContext, layout: MatrixLayout, packing: Packing, how: PackedFormat) -> None:
        super().__init__(ctx, layout, how)
        self._packing, self._how = packing, how
        groups = _groups(layout, how, ctx)
        num_groups = 1 if how.group_size is None else -(-layout.in_features // how.group_size)
        self._shares = [
            MatrixShard(part.num_rows, layout.in_features, num_groups, part.source, layout.columns, groups, how.bits)
            for part in layout.parts
        ]
        self.stored = nn.ModuleList(self._stage(share) for share in self._shares)

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        for part, share, staged in zip(self.layout.parts, self._shares, self.stored, strict=True):
            for suffix, stored in self._tensors(share).items():
                parameter = staged.get_parameter(suffix)
                target = WeightTarget(parameter, stored.shape, stored.source, whole(parameter))
                yield f"{part.name}.{suffix}", target

    def expert_facts(self) -> ExpertFacts | None:
        return self._facts_of_expert() if self._how.order_tensor is None else None

    def read(self) -> tuple[QuantizedWeight, torch.Tensor | None]:
        weight, orders = self.empty_weight(), []
        for part, share, staged in zip(self.layout.parts, self._shares, self.stored, strict=True):
            read = {name: parameter.data for name, parameter in staged.named_parameters()}
            values = self._packing.values(share, read)
            if self._how.order_tensor is not None:
                orders.append(_order(part, read[self._how.order_tensor], self.group_size))
                values = values[:, orders[-1]]
            weight.values[part.destination] = values
            weight.scales[part.destination] = self._packing.scales(share, read)
            self._fill_zero_points(weight, part, self._packing.zero_points(share, read))
        if any(not torch.equal(order, orders[0]) for order in orders):
            raise ModelError(
                f"{self.layout} are one matrix in this engine, but the checkpoint orders their columns differently "
                f"({self._how.order_tensor}, from desc_act or actorder). Quantize the model without that, or take its "
                "unquantized checkpoint."
            )
        order = orders[0] if orders else None
        trivial = order is not None and torch.equal(order, torch.arange(len(order)))
        return weight, None if trivial else order

    def _fill_zero_points(self, weight: QuantizedWeight, part: Part, zeros: torch.Tensor | None) -> None:
        if weight.zero_points is not None:
            assert zeros is not None, "a packing has zero points where the matrix is not symmetric"
            weight.zero_points[part.destination] = zeros
        elif zeros is not None and bool(zeros.any()):
            raise ModelError(
                f"{part.name}: config.json says that the quantization is symmetric, but its zero points are not in the "
                "middle. If config.json is wrong, pass hf_overrides with a quantization_config that has sym=false."
            )

    def _tensors(self, share: MatrixShard) -> dict[str, CheckpointPart]:
        tensors = dict(self._packing.tensors(share, symmetric=self._how.symmetric))
        if self._how.order_tensor is not None:
            size = share.num_columns
            tensors[self._how.order_tensor] = CheckpointPart((size,), (slice(0, size),), torch.int32)
        return tensors

    def _stage(self, share: MatrixShard) -> nn.Module:
        module = nn.Module()
        for suffix, stored in self._tensors(share).items():
            shape = tuple(part.stop - part.start for part in stored.source)
            module.register_parameter(suffix, staging(*shape, dtype=stored.dtype))
        return module


def unpack(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unpacks 32-bit words of unsigned values and subtracts the middle of their range.

    Args:
        words: [a, b], int32.
        bits: Bits of a value.
        dim: The dimension along which values are packed.
        order: Index of the value at each position of a word, the lowest bits first; None for ascending order.

    Returns:
        int8, `32 // bits` times as long along `dim`.
    """
    per_word, middle = 32 // bits, 1 << (bits - 1)
    shape = [size * (per_word if axis == dim else 1) for axis, size in enumerate(words.shape)]
    values = torch.empty(shape, dtype=torch.int8)
    for place, neighbour in enumerate(order or range(per_word)):
        piece = ((words >> (bits * place)) & (2 * middle - 1)) - middle
        strided = values[neighbour::per_word] if dim == 0 else values[:, neighbour::per_word]
        strided.copy_(piece)
    return values


def _groups(layout: MatrixLayout, how: PackedFormat, ctx: BuildContext) -> slice:
    """Range of the groups of this rank's columns.

    Raises:
        ConfigError: A shard boundary is within a group, or the checkpoint has an activation order.
    """
    if how.group_size is None:
        return slice(0, 1)
    start, stop, size = layout.columns.start, layout.columns.stop, how.group_size
    ranks = ctx.shares[0].count
    cut = (start, stop) != (0, layout.in_features)
    if cut and how.order_tensor is not None:
        raise ConfigError(
            f"{layout}: the checkpoint's columns are ordered by importance ({how.order_tensor}, from desc_act or "
            f"actorder), so that they cannot be cut along tensor_parallel_size={ranks} ranks. Use "
            "tensor_parallel_size=1, with pipeline_parallel_size for more devices, or a checkpoint that was quantized "
            "without that."
        )
    if start % size or (stop % size and stop != layout.in_features):
        fitting = [n for n in range(1, ranks) if layout.in_features % n == 0 and layout.in_features // n % size == 0]
        raise ConfigError(
            f"{layout}: tensor_parallel_size={ranks} cuts its {layout.in_features} columns within groups of {size}, "
            f"which share a scale. Use tensor_parallel_size={max(fitting, default=1)}, with pipeline_parallel_size for "
            "more devices, or a checkpoint with smaller groups."
        )
    return slice(start // size, -(-stop // size))


def _order(part: Part, groups: torch.Tensor, group_size: int) -> torch.Tensor:
    """The columns sorted by group, [num_columns], int64.

    Raises:
        ModelError: A group has the wrong number of columns.
    """
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], torch.arange(len(order), dtype=groups.dtype) // group_size):
        raise ModelError(
            f"{part.name}: the columns' groups (g_idx) are not groups of {group_size} columns each, as config.json "
            "says. The checkpoint is damaged, or its config.json belongs to another."
        )
    return order
