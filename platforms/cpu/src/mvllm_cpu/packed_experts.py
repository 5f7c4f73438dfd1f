"""Packs the experts of a mixture-of-experts layer one by one, for `QuantizedMoe`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mvllm.plugin_api import BlockQuantizedPart, BlockQuantizedWeight, Float8Weight, QuantizedWeight
from mvllm_cpu import shared_weights
from mvllm_cpu.block_quantized_linear import ALIGNMENT, FORMATS, BlockQuantizedLinear, halves_of
from mvllm_cpu.memory import Pool
from mvllm_cpu.ops import rows_of
from mvllm_cpu.quantized_linear import QuantizedLinear

BLOCKS, INTEGERS, FLOATS = range(3)
"""`ExpertKind` in csrc/expert_product.h."""

E4M3 = len(FORMATS)
"""The format code of 8-bit floats, which follows the codes of FORMATS."""

ROUNDINGS = ("floats", "dynamic", "static")
"""In the order of `Float8Rounding` in csrc/expert_product.h."""


@dataclass(frozen=True)
class PackedExpertMatrices:
    """One of the two matrices of all experts in the kernels' layout; only `QuantizedMoe` reads it.

    Attributes:
        descriptor: int64, the fields of `ExpertMatrices` in csrc/expert_product.h, which point to the other tensors.
        experts: [experts · halves, 4], int64, the `ExpertMatrix` of each expert.
        parts: [parts, 4], int64, as in PackedBlockWeight; None for integers.
        data: The packed weights.
        num_experts: Number of experts.
    """

    descriptor: torch.Tensor
    experts: torch.Tensor
    parts: torch.Tensor | None
    data: tuple[torch.Tensor, ...]
    num_experts: int

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(tensor.nbytes for tensor in self.data)


class BlockExperts:
    """Packs block-quantized experts into one buffer."""

    def __init__(
        self, op: BlockQuantizedLinear, pool: Pool, first: BlockQuantizedWeight, num_experts: int, halves: int
    ) -> None:
        self._op, self._halves = op, halves
        self._shape, self._int8_activations = first.shape, first.int8_activations
        self._layout, self._expert_bytes = op.layout(self._parts(first), first.in_features)
        self._data = pool.zeros(num_experts * self._expert_bytes, torch.uint8)
        self._next = 0

    def _parts(self, weight: BlockQuantizedWeight) -> Sequence[BlockQuantizedPart]:
        return halves_of(weight) if self._halves == 2 else weight.parts

    def append(self, weight: BlockQuantizedWeight) -> None:
        """Packs the next expert."""
        to = self._data[self._next * self._expert_bytes :]
        self._op.pack_parts(self._parts(weight), weight.in_features, self._layout, to)
        self._next += 1

    def finish(self) -> PackedExpertMatrices:
        """The packed matrices of all experts."""
        self._data = shared_weights.share("experts of blocks", self._data)
        experts = torch.zeros(self._next, 4, dtype=torch.int64)
        experts[:, 0] = self._data.data_ptr() + torch.arange(self._next) * self._expert_bytes
        out_features, in_features = self._shape
        parts = self._layout.data_ptr(), len(self._layout)
        numbers = (BLOCKS, in_features, out_features, self._int8_activations, experts.data_ptr(), *parts, 0, 0)
        descriptor = torch.tensor(numbers, dtype=torch.int64)
        return PackedExpertMatrices(descriptor, experts, self._layout, (self._data,), self._next)


class IntegerExperts:
    """Packs experts of integers. Gate and up are packed as separate matrices, so they may have any number of rows."""

    def __init__(self, op: QuantizedLinear, pool: Pool, first: QuantizedWeight, halves: int) -> None:
        self._op, self._pool, self._halves = op, pool, halves
        self._shape, self._int8_activations = first.shape, first.int8_activations
        self._group_size, self._bits = first.group_size, 0
        self._data: list[torch.Tensor] = []
        self._experts: list[tuple[int, int, int, int]] = []

    def append(self, weight: QuantizedWeight) -> None:
        """Packs the next expert."""
        size = len(weight.values) // self._halves
        for half in range(self._halves):
            rows = slice(half * size, (half + 1) * size)
            zeros = None if weight.zero_points is None else weight.zero_points[rows]
            part = QuantizedWeight(
                weight.values[rows],
                weight.scales[rows],
                zeros,
                weight.group_size,
                weight.bits,
                weight.int8_activations,
            )
            packed = self._op.pack_into(self._pool, part, shares_scales=False)
            self._bits = packed.bits
            tensors = packed.values, packed.scales, packed.zero_points
            self._data += [tensor for tensor in tensors if tensor is not None]
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            self._experts.append((addresses[0], addresses[1], addresses[2], packed.scales.dtype == torch.bfloat16))

    def finish(self) -> PackedExpertMatrices:
        """The packed matrices of all experts."""
        experts = torch.tensor(self._experts, dtype=torch.int64)
        out_features, in_features = self._shape
        sizes = in_features, out_features, self._int8_activations
        numbers = (INTEGERS, *sizes, experts.data_ptr(), 0, 0, self._group_size, self._bits)
        descriptor = torch.tensor(numbers, dtype=torch.int64)
        return PackedExpertMatrices(descriptor, experts, None, tuple(self._data), len(experts) // self._halves)


class FloatExperts:
    """Packs experts of 8-bit floats into one buffer."""

    def __init__(self, library: ctypes.CDLL, pool: Pool, first: Float8Weight, num_experts: int, halves: int) -> None:
        pointer, length = ctypes.c_void_p, ctypes.c_int64
        self._pack = library.mvllm_cpu_float8_pack
        scales = (pointer, length, length, length, length)
        self._pack.argtypes, self._pack.restype = (pointer, length, *scales, pointer, length, length), None
        rows, columns = first.shape
        self._shape, self._size, self._rounding = first.shape, rows // halves, ROUNDINGS.index(first.inputs)
        self._block_columns = min(first.block_columns, columns)
        bytes_of = library.mvllm_cpu_block_packed_size
        bytes_of.argtypes, bytes_of.restype = (length, length, ctypes.c_int), length
        part = -(-bytes_of(self._size, -(-columns // 128) * 128, E4M3) // ALIGNMENT) * ALIGNMENT
        self._layout = torch.tensor([(E4M3, i * part, i * self._size, self._size) for i in range(halves)])
        self._expert_bytes = halves * part
        self._data = pool.zeros(num_experts * self._expert_bytes, torch.uint8)
        self._input_scales: list[float] = []

    def append(self, weight: Float8Weight) -> None:
        """Packs the next expert."""
        codes, scales = rows_of(weight.codes), rows_of(weight.scales.float())
        to = self._data.data_ptr() + len(self._input_scales) * self._expert_bytes
        for _, offset, first, rows in self._layout.tolist():
            self._pack(
                codes[first].data_ptr(),
                codes.stride(0),
                scales.data_ptr(),
                scales.stride(0),
                weight.block_rows,
                weight.block_columns,
                first,
                to + offset,
                rows,
                weight.shape[1],
            )
        self._input_scales.append(1.0 if weight.input_scale is None else float(weight.input_scale))

    def finish(self) -> PackedExpertMatrices:
        """The packed matrices of all experts."""
        self._data = shared_weights.share("experts of floats", self._data)
        count = len(self._input_scales)
        input_scales = torch.tensor(self._input_scales)
        experts = torch.zeros(count, 4, dtype=torch.int64)
        experts[:, 0] = self._data.data_ptr() + torch.arange(count) * self._expert_bytes
        experts[:, 1] = input_scales.data_ptr() + torch.arange(count) * input_scales.itemsize
        out_features, in_features = self._shape
        parts = self._layout.data_ptr(), len(self._layout)
        settings = self._block_columns, self._rounding
        numbers = (FLOATS, in_features, out_features, 0, experts.data_ptr(), *parts, *settings)
        descriptor = torch.tensor(numbers, dtype=torch.int64)
        return PackedExpertMatrices(descriptor, experts, self._layout, (self._data, input_scales), count)
