"""Mixture-of-experts layers with quantized experts and the compiled kernels.

Experts are packed one after the other as `BlockQuantizedLinear` and `QuantizedLinear` pack a weight, and multiplied by
the same kernels (csrc/quantized_moe.cpp). A call reads the weights of the chosen experts only; those of an expert with
at most 96 tokens once.

A token's result depends neither on the other tokens nor on their number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mvllm.plugin_api import BlockQuantizedWeight, OpCase, OpProvider, QuantizedWeight
from mvllm_cpu import workspace
from mvllm_cpu.block_quantized_linear import BlockQuantizedLinear, halves_of
from mvllm_cpu.memory import Pool
from mvllm_cpu.ops import PROVIDER, rows_of
from mvllm_cpu.paged_attention import DTYPE_CODES
from mvllm_cpu.quantized_linear import QuantizedLinear
from mvllm_cpu.recording import Kernel

BLOCKS, INTEGERS = range(2)
"""`ExpertKind` in csrc/expert_product.h."""

BLOCK_VALUES = {"q4_k": 256, "q5_k": 256, "q6_k": 256, "q3_k": 256, "iq4_xs": 256}
"""Values of a block, where they are not 32."""

CHUNK_BYTES = 64 << 20
"""Memory that is mapped at a time for experts smaller than that."""


@dataclass(frozen=True)
class PackedExpertMatrices:
    """One of the two matrices of all experts in the kernels' layout; only `QuantizedMoe` reads it.

    Attributes:
        descriptor: int64, `ExpertMatrices` of csrc/expert_product.h; it has the addresses of the other tensors.
        experts: [experts · halves, 4], int64, its `ExpertMatrix` of each expert.
        parts: [parts, 4], int64, as of PackedBlockWeight; None for integers.
        data: The packed weights.
        num_experts: Experts.
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


class QuantizedMoe:
    """The operation, bound to the opened library.

    Args:
        library: The kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        operands = (pointer, length, pointer, pointer, pointer, pointer, pointer, pointer, pointer)
        sizes = (length, length, length, number, ctypes.c_float, ctypes.c_float, number)
        self._moe = Kernel(library, "mvllm_cpu_quantized_moe", (*operands, *sizes))
        self._blocks = BlockQuantizedLinear(library)
        self._integers = QuantizedLinear(library)
        self._pool = Pool(CHUNK_BYTES)

    def providers(self) -> Sequence[OpProvider]:
        """The operation's provider."""
        return (OpProvider("quantized_moe", PROVIDER, self.quantized_moe, self.supports, prepare=self.pack),)

    def supports(self, case: OpCase) -> list[str]:
        """Reasons why the kernels do not take a case."""
        linear, hidden, inner = (case.facts[name] for name in ("linear", "hidden_size", "intermediate_size"))
        reasons: list[str] = []
        for name, in_features, out_features in (("gate_up", hidden, 2 * inner), ("down", inner, hidden)):
            sizes = {"in_features": in_features, "out_features": out_features, "bias": case.facts["bias"]}
            reasons += self._reasons(linear, case.dtype, {**dict(case.facts[name]), **sizes})
        return list(dict.fromkeys(reasons))

    def _reasons(self, linear: str, dtype: str, facts: dict[str, Any]) -> list[str]:
        case = OpCase(linear, dtype, facts)
        if linear == "quantized_linear":
            return self._integers.supports(case)
        if linear != "block_quantized_linear":
            return [f"experts of {linear} have no kernel"]
        uneven = [
            f"{facts['in_features']} columns are no multiple of the {values} of a block of {name}"
            for name in dict.fromkeys(facts["formats"])
            if facts["in_features"] % (values := BLOCK_VALUES.get(name, 32))
        ]
        return self._blocks.supports(case) + uneven

    def pack(self, weights: tuple[Sequence[Any], Sequence[Any]]) -> tuple[PackedExpertMatrices, PackedExpertMatrices]:
        """The loaded gate_up and down in the kernels' layout. Accesses each item once."""
        gate_up, down = weights
        return self._packed(gate_up, 2), self._packed(down, 1)

    def quantized_moe(
        self,
        x: torch.Tensor,
        gate_up: PackedExpertMatrices,
        gate_up_bias: torch.Tensor | None,
        down: PackedExpertMatrices,
        down_bias: torch.Tensor | None,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        alpha: float | None,
        limit: float | None,
    ) -> torch.Tensor:
        """Sums the weighted outputs of each token's experts; rounds where the reference rounds."""
        rows = rows_of(x)
        out = workspace.empty(x.shape, x.dtype)
        ids, weights = expert_ids.contiguous(), expert_weights.contiguous()
        biases = [None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]
        clamped = alpha is not None and limit is not None
        self._moe(
            rows.data_ptr(),
            rows.stride(0),
            gate_up.descriptor.data_ptr(),
            down.descriptor.data_ptr(),
            *(None if bias is None else bias.data_ptr() for bias in biases),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            gate_up.num_experts,
            ids.shape[1],
            clamped,
            alpha if clamped else 0.0,
            limit if clamped else 0.0,
            DTYPE_CODES[x.dtype],
        )
        return out

    def _packed(self, weights: Sequence[Any], halves: int) -> PackedExpertMatrices:
        packed: _PackedBlocks | _PackedIntegers | None = None
        for expert in range(len(weights)):
            weight = weights[expert]
            if packed is None:
                if isinstance(weight, BlockQuantizedWeight):
                    packed = _PackedBlocks(self._blocks, self._pool, weight, len(weights), halves)
                else:
                    packed = _PackedIntegers(self._integers, self._pool, weight, halves)
            packed.append(weight)
            del weight  # before the next is made
        assert packed is not None, "a layer has experts"
        return packed.finish()


class _PackedBlocks:
    """Experts of blocks, in one buffer."""

    def __init__(
        self, op: BlockQuantizedLinear, pool: Pool, first: BlockQuantizedWeight, num_experts: int, halves: int
    ) -> None:
        self._op, self._halves = op, halves
        self._shape, self._int8_activations = first.shape, first.int8_activations
        self._layout, self._expert_bytes = op.layout(self._parts(first), first.in_features)
        self._data = pool.zeros(num_experts * self._expert_bytes, torch.uint8)
        self._next = 0

    def _parts(self, weight: BlockQuantizedWeight) -> Sequence[Any]:
        return halves_of(weight) if self._halves == 2 else weight.parts

    def append(self, weight: BlockQuantizedWeight) -> None:
        to = self._data[self._next * self._expert_bytes :]
        self._op.pack_parts(self._parts(weight), weight.in_features, self._layout, to)
        self._next += 1

    def finish(self) -> PackedExpertMatrices:
        experts = torch.zeros(self._next, 4, dtype=torch.int64)
        experts[:, 0] = self._data.data_ptr() + torch.arange(self._next) * self._expert_bytes
        out_features, in_features = self._shape
        parts = self._layout.data_ptr(), len(self._layout)
        numbers = (BLOCKS, in_features, out_features, self._int8_activations, experts.data_ptr(), *parts, 0, 0)
        descriptor = torch.tensor(numbers, dtype=torch.int64)
        return PackedExpertMatrices(descriptor, experts, self._layout, (self._data,), self._next)


class _PackedIntegers:
    """Experts of integers; their halves are packed as matrices of their own, so they have any number of rows."""

    def __init__(self, op: QuantizedLinear, pool: Pool, first: QuantizedWeight, halves: int) -> None:
        self._op, self._pool, self._halves = op, pool, halves
        self._shape, self._int8_activations = first.shape, first.int8_activations
        self._group_size, self._bits = first.group_size, 0
        self._data: list[torch.Tensor] = []
        self._experts: list[tuple[int, int, int, int]] = []

    def append(self, weight: QuantizedWeight) -> None:
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
        experts = torch.tensor(self._experts, dtype=torch.int64)
        out_features, in_features = self._shape
        sizes = in_features, out_features, self._int8_activations
        numbers = (INTEGERS, *sizes, experts.data_ptr(), 0, 0, self._group_size, self._bits)
        descriptor = torch.tensor(numbers, dtype=torch.int64)
        return PackedExpertMatrices(descriptor, experts, None, tuple(self._data), len(experts) // self._halves)
