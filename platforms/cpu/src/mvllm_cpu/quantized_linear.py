"""Linear layers with int8 and int4 weights and the compiled kernels; weights are packed once after loading.

There are two kinds of product (csrc/quantized_linear.h). With *int8 activations*, each row of x is rounded to int8 as
in the reference. Sums over a row, or over a group of columns, are exact integers; sums of groups are scaled and added
in float32, in order. *Weight-only* products do not round x: they multiply it by the unscaled integers, exactly, in
bfloat16 (if x is bfloat16 and the processor supports it) or float32, and scale each group's sum in float32. Only the
sums and the result are rounded.

A row's result does not depend on the other rows or their number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mvllm.plugin_api import OpCase, OpProvider, QuantizedWeight
from mvllm_cpu import shared_weights, workspace
from mvllm_cpu.memory import Pool
from mvllm_cpu.ops import PROVIDER, rows_of
from mvllm_cpu.paged_attention import DTYPE_CODES, DTYPES
from mvllm_cpu.recording import Kernel
from mvllm_cpu.shared_weights import Memory, Packed

MOST_INT8_COLUMNS = 1 << 16
"""Largest in_features for which sums of int8 products fit into 32 bits."""

MOST_INT8_GROUP = 256
"""Largest group size with int8 activations. Several smaller groups of nibbles are summed together if their scales are
small multiples of one number, see `_factors`."""

MOST_FACTOR = 8
"""Largest factor for which (nibble - zero point) * factor fits into int8."""

STRIP = 16
"""Columns that kernels compute together (csrc/kernels.h)."""

LANE_BITS = 32
"""Bits of a lane, which holds 4 adjacent 8-bit values of a row or 8 adjacent 4-bit values."""


@dataclass(frozen=True)
class PackedQuantizedWeight:
    """A QuantizedWeight in the layout of csrc/quantized_linear.h; only `QuantizedLinear.quantized_linear` reads it.

    Attributes:
        values: int32 lanes.
        scales: float32; bfloat16 if that is exact for the scales of groups.
        zero_points: int8, or None; for int8 activations nibbles, with the factors of groups in the other nibbles.
        out_features, in_features, group_size: Sizes of the weight.
        block_size: Number of columns that share one of `scales`.
        bits: Bits of a value in `values`.
        int8_activations: Whether inputs are rounded to int8.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    out_features: int
    in_features: int
    group_size: int
    block_size: int
    bits: int
    int8_activations: bool


class QuantizedLinear:
    """The operation, bound to the opened library.

    Args:
        library: The kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._tile = int(library.mvllm_cpu_quantized_linear_tile())
        self._pack = library.mvllm_cpu_quantized_linear_pack
        self._pack.argtypes = (
            *(pointer, length, pointer, pointer, pointer, pointer, pointer, pointer),
            *(length, length, length, length, number, number, number),
        )
        self._pack.restype = None
        operands = (pointer, length, pointer, pointer, pointer, pointer, pointer)
        sizes = (length, length, length, length, length, number, number, number, number)
        self._product = Kernel(library, "mvllm_cpu_quantized_linear", (*operands, *sizes))
        self._product_silu = Kernel(library, "mvllm_cpu_quantized_linear_silu_and_mul", (*operands, *sizes))
        self._pool = Pool()

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        silu = self.quantized_linear_silu_and_mul
        return (
            OpProvider(
                *("quantized_linear", PROVIDER, self.quantized_linear, self.supports),
                prepare=self.pack,
                batch_invariant=True,
            ),
            OpProvider(
                *("quantized_linear_silu_and_mul", PROVIDER, silu, self.supports_silu),
                prepare=self.pack,
                batch_invariant=True,
            ),
        )

    def supports(self, case: OpCase) -> list[str]:
        """Reasons why the kernels do not take a case."""
        reasons = []
        if case.dtype not in DTYPES:
            reasons.append(f"dtype {case.dtype} has no kernel (there are kernels for {', '.join(DTYPES)})")
        in_features, group_size, bits = (case.facts[name] for name in ("in_features", "group_size", "bits"))
        one_group = group_size >= in_features
        if bits not in (4, 8):
            reasons.append(f"weights of {bits} bits have no kernel (there are kernels for 4 and 8)")
        elif not one_group and group_size % (LANE_BITS // bits):
            reasons.append(f"groups of {group_size} are no multiple of {LANE_BITS // bits}")
        if case.facts["int8_activations"] and not one_group and group_size > MOST_INT8_GROUP:
            reasons.append(f"with int8 activations groups have at most {MOST_INT8_GROUP} columns")
        if case.facts["int8_activations"] and in_features > MOST_INT8_COLUMNS:
            reasons.append(f"sums over more than {MOST_INT8_COLUMNS} products of int8 can exceed 32 bits")
        return reasons

    def supports_silu(self, case: OpCase) -> list[str]:
        """Reasons why the product and its activation are not fused."""
        size = case.facts["size"]
        reasons = self.supports(case)
        if size % STRIP:
            reasons.append(f"{size} columns are no multiple of {STRIP}")
        return reasons

    def pack(self, weight: QuantizedWeight) -> PackedQuantizedWeight:
        """The weight in the kernels' layout."""
        return self.pack_into(self._pool, weight)

    def pack_into(self, pool: Pool, weight: QuantizedWeight, *, shares_scales: bool = True) -> PackedQuantizedWeight:
        """The weight in the kernels' layout, in memory of `pool` or mapped (`shared_weights.py`).

        Args:
            pool: The memory pool.
            weight: The weight.
            shares_scales: Whether `block_size` may exceed the group size if the scales allow it, see `_factors`.
        """
        packed = shared_weights.pack(
            "integers",
            (weight.group_size, weight.bits, weight.int8_activations, shares_scales),
            (weight.values, weight.scales, weight.zero_points),
            pool,
            lambda memory: self._fill(memory, weight, shares_scales),
        )
        values, scales, *zero_points = packed.tensors
        block_size, bits = packed.numbers
        out_features, in_features = weight.values.shape
        return PackedQuantizedWeight(
            values,
            scales,
            zero_points[0] if zero_points else None,
            out_features,
            in_features,
            weight.group_size,
            block_size,
            bits,
            weight.int8_activations,
        )

    def _fill(self, memory: Memory, weight: QuantizedWeight, shares_scales: bool) -> Packed:
        out_features, in_features = weight.values.shape
        values = rows_of(weight.values)
        scales = weight.scales.float().contiguous()
        zero_points = None if weight.zero_points is None else weight.zero_points.contiguous()
        groups, block_size, factors = scales.shape[1], weight.group_size, None
        # Int8 products read bytes. Nibbles in groups are unpacked to bytes by the kernel; without groups, here.
        bits = 8 if weight.int8_activations and groups == 1 else weight.bits
        with_factors = bits == 4 and weight.int8_activations
        if shares_scales and with_factors and MOST_INT8_GROUP % weight.group_size == 0:
            per_block = MOST_INT8_GROUP // weight.group_size
            found = _factors(scales, per_block, narrow=True) or _factors(scales, per_block, narrow=False)
            if found is not None:
                scales, factors = found
                block_size = MOST_INT8_GROUP
        blocks = scales.shape[1]
        narrow = weight.int8_activations and groups > 1 and bool((scales.bfloat16().float() == scales).all())
        depth = LANE_BITS // bits
        tiles, lanes = -(-out_features // self._tile), -(-in_features // depth)
        has_zeros = zero_points is not None or factors is not None
        packed_values = memory.zeros(tiles * lanes * self._tile, torch.int32)
        packed_scales = memory.zeros(tiles * blocks * self._tile, torch.bfloat16 if narrow else torch.float32)
        packed_zeros = memory.zeros(tiles * groups * self._tile, torch.int8) if has_zeros else None
        self._pack(
            values.data_ptr(),
            values.stride(0),
            scales.data_ptr(),
            _pointer(zero_points),
            _pointer(factors),
            packed_values.data_ptr(),
            packed_scales.data_ptr(),
            _pointer(packed_zeros),
            out_features,
            in_features,
            groups,
            blocks,
            bits,
            weight.int8_activations,
            narrow,
        )
        optional = () if packed_zeros is None else (packed_zeros,)
        return Packed((packed_values, packed_scales, *optional), (block_size, bits))

    def quantized_linear(
        self, x: torch.Tensor, weight: PackedQuantizedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x · weightᵀ + bias; sums in float32 or exact, rounded once."""
        return self._call(self._product, x, weight, bias, weight.out_features)

    def quantized_linear_silu_and_mul(
        self, x: torch.Tensor, weight: PackedQuantizedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """silu(first half) * second half of the product; bit-identical to the separate operations."""
        return self._call(self._product_silu, x, weight, bias, weight.out_features // 2)

    def _call(
        self, kernel: Kernel, x: torch.Tensor, weight: PackedQuantizedWeight, bias: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        rows = rows_of(x)
        out = workspace.empty((*x.shape[:-1], size), x.dtype)
        kernel(
            rows.data_ptr(),
            rows.stride(0),
            weight.values.data_ptr(),
            weight.scales.data_ptr(),
            _pointer(weight.zero_points),
            _pointer(bias),
            out.data_ptr(),
            rows.shape[0],
            weight.in_features,
            size,
            weight.group_size,
            weight.block_size,
            weight.bits,
            weight.int8_activations,
            weight.scales.dtype == torch.bfloat16,
            DTYPE_CODES[x.dtype],
        )
        return out


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _factors(scales: torch.Tensor, per_block: int, *, narrow: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Splits scales [rows, groups] into scales [rows, blocks], one per `per_block` groups, and int8 factors per group.

    None if any scale is not exactly an integer factor, at most MOST_FACTOR, times the scale of its block; with
    `narrow`, the scales of blocks must be exact in bfloat16.
    """
    rows, groups = scales.shape
    blocks = -(-groups // per_block)
    padded = torch.nn.functional.pad(scales, (0, blocks * per_block - groups)).view(rows, blocks, per_block)
    largest = padded.amax(dim=2, keepdim=True)
    base, factors = torch.zeros_like(largest), torch.zeros_like(padded)
    for most in range(MOST_FACTOR, 0, -1):
        unit = largest / most
        whole = (padded / unit).round()
        fits = (whole * unit == padded).all(dim=2, keepdim=True)
        if narrow:
            fits &= unit.bfloat16() == unit
        base, factors = torch.where(fits, unit, base), torch.where(fits, whole, factors)
    factors = factors.view(rows, -1)[:, :groups]
    if not bool((base > 0).all() & (factors >= 1).all()):
        return None
    return base[:, :, 0].contiguous(), factors.to(torch.int8).contiguous()
