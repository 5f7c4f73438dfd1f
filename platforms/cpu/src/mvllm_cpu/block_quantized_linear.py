"""Linear layers with block-quantized (GGUF) weights and the compiled kernels; weights are packed once after loading.

The packed weight interleaves the columns of a product and has about as many bytes as the file (csrc/block_linear.h).
There are two kinds of product. With *int8 activations*, runs of 32 elements of x are rounded to int8 as in the
reference; sums within a group of a block are exact integers, which are scaled and added in float32. *Weight-only*
products multiply x by the dequantized weight in float32.

A row's result does not depend on the other rows or their number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mvllm.plugin_api import BlockQuantizedPart, BlockQuantizedWeight, OpCase, OpProvider
from mvllm_cpu import shared_weights, workspace
from mvllm_cpu.memory import Pool
from mvllm_cpu.ops import PROVIDER, listed, rows_of
from mvllm_cpu.paged_attention import DTYPE_CODES, DTYPES
from mvllm_cpu.recording import Kernel
from mvllm_cpu.shared_weights import Memory, Packed

FORMATS = ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4", "q5_0", "q5_1", "q3_k", "iq4_nl", "iq4_xs")
"""In the order of `BlockFormat` in csrc/block_linear.h."""

ALIGNMENT = 64
"""Alignment of the parts of a packed weight in bytes: a cache line."""

STRIP = 16
"""Columns that kernels compute together (csrc/kernels.h)."""


@dataclass(frozen=True)
class PackedBlockWeight:
    """A BlockQuantizedWeight in the kernels' layout (csrc/block_linear.h); only `BlockQuantizedLinear` reads it.

    Attributes:
        data: The packed blocks, uint8.
        parts: [parts, 4], int64: format, offset of its first tile, first column and number of columns of each part.
        out_features, in_features: Sizes of the weight.
        int8_activations: Whether inputs are rounded to int8.
        dtype: Dtype of looked-up rows.
    """

    data: torch.Tensor
    parts: torch.Tensor
    out_features: int
    in_features: int
    int8_activations: bool
    dtype: torch.dtype


class BlockQuantizedLinear:
    """The operation, bound to the opened library.

    Args:
        library: The kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._packed_size = library.mvllm_cpu_block_packed_size
        self._packed_size.argtypes, self._packed_size.restype = (length, length, number), length
        self._pack = library.mvllm_cpu_block_pack
        self._pack.argtypes, self._pack.restype = (pointer, length, pointer, length, length, number), None
        arguments = (
            pointer,
            length,
            pointer,
            pointer,
            length,
            pointer,
            pointer,
            length,
            length,
            length,
            number,
            number,
        )
        self._product = Kernel(library, "mvllm_cpu_block_linear", arguments, weight=2)
        lookup = (pointer, number, pointer, pointer, length, pointer, length, length, length, number)
        self._lookup = Kernel(library, "mvllm_cpu_block_embedding", lookup)
        self._product_silu = Kernel(library, "mvllm_cpu_block_linear_silu_and_mul", arguments, weight=2)
        self._pool = Pool()

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        name, silu = "block_quantized_linear", self.block_quantized_linear_silu_and_mul
        return (
            OpProvider(
                *(name, PROVIDER, self.block_quantized_linear, self.supports),
                prepare=self.pack,
                lookup=self.lookup,
                batch_invariant=True,
            ),
            OpProvider(
                *(f"{name}_silu_and_mul", PROVIDER, silu, self.supports_silu),
                prepare=self.pack_halves,
                batch_invariant=True,
            ),
        )

    def supports(self, case: OpCase) -> list[str]:
        """Reasons why the kernels do not take a case."""
        reasons = []
        if case.dtype not in DTYPES:
            reasons.append(f"dtype {case.dtype} has no kernel (there are kernels for {', '.join(DTYPES)})")
        unknown = [name for name in dict.fromkeys(case.facts["formats"]) if name not in FORMATS]
        if unknown:
            reasons.append(f"{', '.join(unknown)} has no kernel (there are kernels for {', '.join(FORMATS)})")
        return reasons

    def supports_silu(self, case: OpCase) -> list[str]:
        """Reasons why the product and its activation are not fused."""
        size = case.facts["size"]
        reasons = self.supports(case)
        if size % STRIP:
            reasons.append(f"{size} columns are no multiple of {STRIP}")
        return reasons

    def pack(self, weight: BlockQuantizedWeight) -> PackedBlockWeight:
        """The weight in the kernels' layout."""
        return self._packed(weight, weight.parts)

    def pack_halves(self, weight: BlockQuantizedWeight) -> PackedBlockWeight:
        """Like `pack`, with parts split so that both halves of the rows consist of parts of the same sizes."""
        return self._packed(weight, halves_of(weight))

    def layout(self, parts: Sequence[BlockQuantizedPart], in_features: int) -> tuple[torch.Tensor, int]:
        """Memory layout of the packed parts of a weight.

        Returns:
            [parts, 4], int64, see PackedBlockWeight; and the bytes of all parts, a multiple of ALIGNMENT.
        """
        table, size, column = [], 0, 0
        for part in parts:
            code, rows = FORMATS.index(part.format), len(part.data)
            table.append((code, size, column, rows))
            size += -(-self._packed_size(rows, in_features, code) // ALIGNMENT) * ALIGNMENT
            column += rows
        return torch.tensor(table), size

    def pack_parts(
        self, parts: Sequence[BlockQuantizedPart], in_features: int, layout: torch.Tensor, to: torch.Tensor
    ) -> None:
        """Packs parts into `to`, uint8 and filled with zeros, with the offsets in `layout`."""
        for part, (code, offset, _, rows) in zip(parts, layout.tolist(), strict=True):
            blocks = rows_of(part.data)
            self._pack(blocks.data_ptr(), blocks.stride(0), to.data_ptr() + offset, rows, in_features, code)

    def block_quantized_linear(
        self, x: torch.Tensor, weight: PackedBlockWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x · weightᵀ + bias; sums in float32, rounded once."""
        return self._call(self._product, x, weight, bias, weight.out_features)

    def block_quantized_linear_silu_and_mul(
        self, x: torch.Tensor, weight: PackedBlockWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """silu(first half) * second half of the product; bit-identical to the separate operations."""
        return self._call(self._product_silu, x, weight, bias, weight.out_features // 2)

    def lookup(self, ids: torch.Tensor, weight: PackedBlockWeight, first: int | None = None) -> torch.Tensor:
        """Rows of a packed weight, so that a tied token embedding needs no second copy."""
        ids = listed(ids)
        out = workspace.empty((*ids.shape, weight.in_features), weight.dtype)
        self._lookup(
            ids.data_ptr(),
            ids.dtype == torch.int64,
            weight.data.data_ptr(),
            weight.parts.data_ptr(),
            len(weight.parts),
            out.data_ptr(),
            ids.numel(),
            weight.in_features,
            first or 0,
            DTYPE_CODES[weight.dtype],
        )
        return out

    def _packed(self, weight: BlockQuantizedWeight, parts: Sequence[BlockQuantizedPart]) -> PackedBlockWeight:
        layout, size = self.layout(parts, weight.in_features)
        columns, in_features = weight.shape

        def fill(memory: Memory) -> Packed:
            data = memory.zeros(size, torch.uint8)
            self.pack_parts(parts, in_features, layout, data)
            return Packed((data,))

        facts, sources = (in_features, *layout.view(-1).tolist()), [part.data for part in parts]
        (data,) = shared_weights.pack("blocks", facts, sources, self._pool, fill).tensors
        return PackedBlockWeight(data, layout, columns, in_features, weight.int8_activations, weight.dtype)

    def _call(
        self, kernel: Kernel, x: torch.Tensor, weight: PackedBlockWeight, bias: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        rows = rows_of(x)
        out = workspace.empty((*x.shape[:-1], size), x.dtype)
        kernel(
            rows.data_ptr(),
            rows.stride(0),
            weight.data.data_ptr(),
            weight.parts.data_ptr(),
            len(weight.parts),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            weight.in_features,
            size,
            weight.int8_activations,
            DTYPE_CODES[x.dtype],
        )
        return out


def halves_of(weight: BlockQuantizedWeight) -> list[BlockQuantizedPart]:
    """The parts of a weight, split so that both halves of its rows consist of parts of the same sizes."""
    half = weight.shape[0] // 2
    ends, row = {half}, 0
    for part in weight.parts:
        row += len(part.data)
        ends |= {row, row - half, row + half}
    boundaries = sorted(end for end in ends if 0 < end < 2 * half)
    parts: list[BlockQuantizedPart] = []
    first = 0
    for part in weight.parts:
        inner = [boundary - first for boundary in boundaries if first < boundary < first + len(part.data)]
        parts += [BlockQuantizedPart(part.format, piece) for piece in part.data.tensor_split(inner)]
        first += len(part.data)
    return parts
