"""Mixture-of-experts layers with quantized experts and the compiled kernels.

Experts are packed one by one like the weights of `BlockQuantizedLinear` and `QuantizedLinear`, and multiplied by the
same kernels (csrc/quantized_moe.cpp). The kernel converts 8-bit floats to float32, like blocks in weight-only products.
A call reads only the weights of the selected experts, once per 96 tokens of an expert.

A token's result does not depend on the other tokens or their number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from mvllm.plugin_api import BlockQuantizedWeight, Float8Weight, OpCase, OpProvider
from mvllm_cpu import workspace
from mvllm_cpu.activation_ops import FUNCTIONS
from mvllm_cpu.block_quantized_linear import BlockQuantizedLinear
from mvllm_cpu.memory import Pool
from mvllm_cpu.ops import PROVIDER, rows_of
from mvllm_cpu.packed_experts import BlockExperts, FloatExperts, IntegerExperts, PackedExpertMatrices
from mvllm_cpu.paged_attention import DTYPE_CODES, DTYPES
from mvllm_cpu.quantized_linear import QuantizedLinear
from mvllm_cpu.recording import Kernel

BLOCK_VALUES = {"q4_k": 256, "q5_k": 256, "q6_k": 256, "q3_k": 256, "iq4_xs": 256}
"""Values per block of formats whose blocks do not have 32 values."""

FLOAT8_COLUMNS = 128
"""Columns of 8-bit floats that share a scale in the kernels' layout."""

FLOAT8_RUN = 32
"""Columns of 8-bit floats that kernels compute together."""

CHUNK_BYTES = 64 << 20
"""Memory that is mapped at a time for experts of less than a quarter of this size."""


SILU_GATE, CLAMPED_GATE, NO_GATE = range(3)
"""Values of `Gate` in csrc/quantized_moe.cpp."""


class QuantizedMoe:
    """The operations `quantized_moe` and `quantized_ungated_moe`, bound to the opened library.

    Args:
        library: The kernels.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        operands = (pointer, length, pointer, pointer, pointer, pointer, pointer, pointer, pointer)
        sizes = (length, length, length, number, number, ctypes.c_float, ctypes.c_float, number)
        self._moe = Kernel(library, "mvllm_cpu_quantized_moe", (*operands, *sizes))
        self._blocks = BlockQuantizedLinear(library)
        self._integers = QuantizedLinear(library)
        self._library = library
        self._pool = Pool(CHUNK_BYTES)

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        return (
            OpProvider(
                *("quantized_moe", PROVIDER, self.quantized_moe, self.supports),
                prepare=self.pack,
                batch_invariant=True,
            ),
            OpProvider(
                *("quantized_ungated_moe", PROVIDER, self.quantized_ungated_moe, self.supports),
                prepare=self.pack_ungated,
                batch_invariant=True,
            ),
        )

    def supports(self, case: OpCase) -> list[str]:
        """Reasons why the kernels do not take a case of either operation."""
        linear, hidden, inner = (case.facts[name] for name in ("linear", "hidden_size", "intermediate_size"))
        first = ("gate_up", hidden, 2 * inner) if case.op == "quantized_moe" else ("up", hidden, inner)
        reasons: list[str] = []
        for name, in_features, out_features in (first, ("down", inner, hidden)):
            sizes = {"in_features": in_features, "out_features": out_features, "bias": case.facts.get("bias", False)}
            reasons += self._reasons(linear, case.dtype, {**dict(case.facts[name]), **sizes})
        return list(dict.fromkeys(reasons))

    def _reasons(self, linear: str, dtype: str, facts: dict[str, Any]) -> list[str]:
        case = OpCase(linear, dtype, facts)
        if linear == "quantized_linear":
            return self._integers.supports(case)
        if linear == "float8_linear":
            return _float8_reasons(dtype, facts)
        if linear != "block_quantized_linear":
            return [f"experts of {linear} have no kernel"]
        uneven = [
            f"{facts['in_features']} columns are no multiple of the {values} of a block of {name}"
            for name in dict.fromkeys(facts["formats"])
            if facts["in_features"] % (values := BLOCK_VALUES.get(name, 32))
        ]
        return self._blocks.supports(case) + uneven

    def pack(self, weights: tuple[Sequence[Any], Sequence[Any]]) -> tuple[PackedExpertMatrices, PackedExpertMatrices]:
        """The loaded gate_up and down in the kernels' layout. Accesses each weight once."""
        gate_up, down = weights
        return self._packed(gate_up, 2), self._packed(down, 1)

    def pack_ungated(
        self, weights: tuple[Sequence[Any], Sequence[Any]]
    ) -> tuple[PackedExpertMatrices, PackedExpertMatrices]:
        """The loaded up and down, likewise."""
        up, down = weights
        return self._packed(up, 1), self._packed(down, 1)

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
        biases = gate_up_bias, down_bias
        if alpha is None or limit is None:
            return self._call(x, gate_up, down, biases, expert_ids, expert_weights, SILU_GATE)
        return self._call(x, gate_up, down, biases, expert_ids, expert_weights, CLAMPED_GATE, limits=(alpha, limit))

    def quantized_ungated_moe(
        self,
        x: torch.Tensor,
        up: PackedExpertMatrices,
        down: PackedExpertMatrices,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """Likewise, without gates."""
        function = FUNCTIONS.index(activation)
        return self._call(x, up, down, (None, None), expert_ids, expert_weights, NO_GATE, function)

    def _call(
        self,
        x: torch.Tensor,
        first: PackedExpertMatrices,
        down: PackedExpertMatrices,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate: int,
        function: int = 0,
        limits: tuple[float, float] = (0.0, 0.0),
    ) -> torch.Tensor:
        rows = rows_of(x)
        out = workspace.empty(x.shape, x.dtype)
        ids, weights = expert_ids.contiguous(), expert_weights.contiguous()
        kept = [None if bias is None else bias.contiguous() for bias in biases]
        self._moe(
            rows.data_ptr(),
            rows.stride(0),
            first.descriptor.data_ptr(),
            down.descriptor.data_ptr(),
            *(None if bias is None else bias.data_ptr() for bias in kept),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            first.num_experts,
            ids.shape[1],
            gate,
            function,
            *limits,
            DTYPE_CODES[x.dtype],
        )
        return out

    def _packed(self, weights: Sequence[Any], halves: int) -> PackedExpertMatrices:
        packed: BlockExperts | IntegerExperts | FloatExperts | None = None
        for expert in range(len(weights)):
            weight = weights[expert]
            if packed is None:
                if isinstance(weight, BlockQuantizedWeight):
                    packed = BlockExperts(self._blocks, self._pool, weight, len(weights), halves)
                elif isinstance(weight, Float8Weight):
                    packed = FloatExperts(self._library, self._pool, weight, len(weights), halves)
                else:
                    packed = IntegerExperts(self._integers, self._pool, weight, halves)
            packed.append(weight)
            del weight  # before the next one is created
        assert packed is not None, "a layer has experts"
        return packed.finish()


def _float8_reasons(dtype: str, facts: dict[str, Any]) -> list[str]:
    in_features, block_columns = facts["in_features"], facts["block_columns"]
    reasons = []
    if dtype not in DTYPES:
        reasons.append(f"dtype {dtype} has no kernel (there are kernels for {', '.join(DTYPES)})")
    if in_features % FLOAT8_RUN:
        reasons.append(f"{in_features} columns of 8-bit floats are no multiple of {FLOAT8_RUN}")
    if block_columns < in_features and block_columns % FLOAT8_COLUMNS:
        reasons.append(f"blocks of {block_columns} columns of 8-bit floats are no multiple of {FLOAT8_COLUMNS}")
    return reasons
