"""Linear layers with the compiled kernels; weights are packed once after loading, for the current instruction set.

One packing is used for any number of rows. With few rows (decode) the product is memory-bound and reads the weight
sequentially; with many rows it is compute-bound. A row's result does not depend on the other rows or their number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mvllm.plugin_api import OpCase, OpProvider
from mvllm_cpu import memory as memory_pages
from mvllm_cpu import shared_weights, workspace
from mvllm_cpu.memory import Pool
from mvllm_cpu.ops import PROVIDER, listed, rows_of
from mvllm_cpu.paged_attention import DTYPE_CODES, DTYPES
from mvllm_cpu.recording import Kernel
from mvllm_cpu.shared_weights import Memory, Packed

FASTER_THAN_ONEDNN = 1
"""Priority of this provider; others have 0."""

AMX = "amx_bf16"
"""Products of bfloat16 on AMX tiles."""

FASTEST_WITH = {
    "bfloat16": ("avx2", "avx512", "avx512_bf16", AMX),
    "float16": ("avx2", "avx512", "avx512_bf16", AMX),
    "float32": ("avx512", "avx512_bf16", AMX),
}
"""Instruction sets for which this kernel is the fastest provider for any number of rows, by dtype."""

LARGE = 64 << 20
"""Size in bytes from which a weight affects the peak memory of loading."""

VOCABULARY_RATIO = 16
"""Minimum out_features / in_features of a weight that is treated as a language-model head."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out_features, in_features] in the kernels' layout (csrc/kernels.h); only `Linear` reads it."""

    data: torch.Tensor
    out_features: int
    in_features: int


class Linear:
    """The operation, bound to the opened library.

    Args:
        library: The kernels.
        isa: Instruction set of the kernels.
    """

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._isa = isa
        self._pool = Pool()
        self._packed_size = library.mvllm_cpu_linear_packed_size
        self._packed_size.argtypes = (length, length, number)
        self._packed_size.restype = length
        self._pack = library.mvllm_cpu_linear_pack
        self._pack.argtypes = (pointer, length, pointer, length, length, number)
        self._pack.restype = None
        linear = (pointer, length, pointer, pointer, pointer, length, length, length, number)
        self._linear = Kernel(library, "mvllm_cpu_linear", linear, weight=2)
        self._linear_silu = Kernel(library, "mvllm_cpu_linear_silu_and_mul", linear, weight=2)
        lookup = (pointer, number, pointer, pointer, length, length, length, length, number)
        self._lookup = Kernel(library, "mvllm_cpu_packed_embedding", lookup)
        self._silu_takes = library.mvllm_cpu_linear_silu_and_mul_takes
        self._silu_takes.argtypes = (length, length, number)

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        return (
            OpProvider(
                *("linear", PROVIDER, self.linear, self.supports, FASTER_THAN_ONEDNN),
                prepare=self.pack,
                lookup=self.lookup,
                batch_invariant=True,
            ),
            OpProvider(
                *("linear_silu_and_mul", PROVIDER, self.linear_silu_and_mul, self.supports_silu),
                prepare=self.pack,
                batch_invariant=True,
            ),
        )

    def supports(self, case: OpCase) -> list[str]:
        """Reasons why the kernel does not support a case, or is not the fastest for it."""
        fastest_with = FASTEST_WITH.get(case.dtype)
        if fastest_with is None:
            return [f"dtype {case.dtype} has no kernel (there are kernels for {', '.join(FASTEST_WITH)})"]
        if case.batch_invariant:
            return []
        if self._isa not in fastest_with:
            return [f"for {case.dtype} the kernel is the fastest with {'/'.join(fastest_with)}, not with {self._isa}"]
        if case.dtype == "bfloat16" and self._isa != AMX and torch.cpu._is_amx_tile_supported() and not _is_head(case):
            return ["oneDNN multiplies matrices with AMX here"]
        return []

    def supports_silu(self, case: OpCase) -> list[str]:
        """Reasons why the product and its activation are not fused."""
        in_features, size = case.facts["in_features"], case.facts["size"]
        facts = {"in_features": in_features, "out_features": 2 * size, "bias": case.facts["bias"]}
        reasons = self.supports(OpCase("linear", case.dtype, facts, case.batch_invariant))
        if not reasons and not self._silu_takes(in_features, size, DTYPE_CODES[DTYPES[case.dtype]]):
            reasons = [
                f"{size} columns of {in_features} {case.dtype} are not what the fused kernel takes with {self._isa}"
            ]
        return reasons

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """A weight [out_features, in_features] in the kernels' layout.

        The pages of a large weight are released as it is packed, so that it is not in memory twice.
        """
        weight = rows_of(weight.detach())
        out_features, in_features = weight.shape
        packed = shared_weights.pack("linear", (), (weight,), self._pool, lambda memory: self._fill(weight, memory))
        return PackedWeight(packed.tensors[0], out_features, in_features)

    def _fill(self, weight: torch.Tensor, memory: Memory) -> Packed:
        out_features, in_features = weight.shape
        code = DTYPE_CODES[weight.dtype]
        data = memory.zeros(self._packed_size(out_features, in_features, code), weight.dtype)
        is_large = weight.nbytes >= LARGE and weight.untyped_storage().nbytes() == weight.nbytes
        tile = self._packed_size(1, 1, DTYPE_CODES[torch.float32])
        step = max(1, LARGE // 2 // weight[0].nbytes // tile) * tile if is_large else out_features
        for first in range(0, out_features, step):
            rows = weight[first : first + step]
            to = data.data_ptr() + self._packed_size(first, in_features, code) * data.itemsize
            self._pack(rows.data_ptr(), rows.stride(0), to, len(rows), in_features, code)
            if is_large:
                memory_pages.release_pages(rows)
        return Packed((data,))

    def linear(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """x · weightᵀ + bias; sums in float32, rounded once."""
        return self._call(self._linear, x, weight, bias, weight.out_features)

    def linear_silu_and_mul(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """silu(first half) * second half of the product; bit-identical to the separate operations."""
        return self._call(self._linear_silu, x, weight, bias, weight.out_features // 2)

    def lookup(self, ids: torch.Tensor, weight: PackedWeight, first: int | None = None) -> torch.Tensor:
        """Rows of a packed weight, so that a tied token embedding needs no second copy."""
        ids = listed(ids)
        out = workspace.empty((*ids.shape, weight.in_features), weight.data.dtype)
        self._lookup(
            ids.data_ptr(),
            ids.dtype == torch.int64,
            weight.data.data_ptr(),
            out.data_ptr(),
            ids.numel(),
            weight.in_features,
            first or 0,
            weight.out_features,
            DTYPE_CODES[weight.data.dtype],
        )
        return out

    def _call(
        self, kernel: Kernel, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        rows = rows_of(x)
        out = workspace.empty((*x.shape[:-1], size), x.dtype)
        kernel(
            rows.data_ptr(),
            rows.stride(0),
            weight.data.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            weight.in_features,
            size,
            DTYPE_CODES[x.dtype],
        )
        return out


def _is_head(case: OpCase) -> bool:
    """Whether the case looks like a language-model head.

    A head has few input rows, so every kernel is memory-bound. If the weight is tied to the token embedding, oneDNN's
    packed form would be a second copy.
    """
    return case.facts.get("out_features", 0) >= VOCABULARY_RATIO * case.facts.get("in_features", 1)
