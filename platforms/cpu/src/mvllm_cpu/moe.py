"""Mixture-of-experts layers with the compiled kernels: one call, without a loop over experts in Python.

Weights are packed once after loading, expert by expert and in place if the sizes allow it, without a second copy. A
token's result does not depend on the other tokens or their number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mvllm.plugin_api import OpProvider
from mvllm_cpu import shared_weights, workspace
from mvllm_cpu.activation_ops import FUNCTIONS
from mvllm_cpu.ops import PROVIDER, rows_of, supports
from mvllm_cpu.paged_attention import DTYPE_CODES
from mvllm_cpu.recording import Kernel

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")
"""In the order of `Scores` in csrc/expert_selection.cpp."""

GATE_UP, DOWN, UP = 0, 1, 2
"""Matrices of experts, as csrc/moe.cpp numbers them; UP is the first one of experts without a gate."""


@dataclass(frozen=True)
class PackedExperts:
    """One of the two weights of all experts in the kernels' layout (csrc/moe.cpp); only `Moe.moe` reads it."""

    data: torch.Tensor
    num_experts: int
    intermediate_size: int


class Moe:
    """The operations, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._expert_bytes = library.mvllm_cpu_moe_expert_bytes
        self._expert_bytes.argtypes = (number, length, length, number)
        self._expert_bytes.restype = length
        self._pack = library.mvllm_cpu_moe_pack
        self._pack.argtypes = (number, pointer, pointer, length, length, length, number)
        self._pack.restype = None
        sizes = (length, length, length, length, length, number)
        moe = (pointer, length, pointer, pointer, pointer, pointer, pointer, *sizes)
        self._moe = Kernel(library, "mvllm_cpu_moe", moe)
        self._gelu_tanh_moe = Kernel(library, "mvllm_cpu_gelu_tanh_moe", moe)
        self._ungated_moe = Kernel(library, "mvllm_cpu_ungated_moe", (*moe[:-1], number, number))
        selection = (pointer, length, pointer, pointer, pointer, length, length, length, number, number, ctypes.c_float)
        self._select_experts = Kernel(library, "mvllm_cpu_select_experts", (*selection, length, length, number, number))
        clamped = (pointer, length, *(pointer,) * 7, *sizes[:-1], ctypes.c_float, ctypes.c_float, number)
        self._clamped_moe = Kernel(library, "mvllm_cpu_clamped_moe", clamped)

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        return (
            OpProvider("moe", PROVIDER, self.moe, supports, prepare=self.pack, batch_invariant=True),
            OpProvider(
                "gelu_tanh_moe", PROVIDER, self.gelu_tanh_moe, supports, prepare=self.pack, batch_invariant=True
            ),
            OpProvider("clamped_moe", PROVIDER, self.clamped_moe, supports, prepare=self.pack, batch_invariant=True),
            OpProvider(
                *("ungated_moe", PROVIDER, self.ungated_moe, supports), prepare=self.pack_ungated, batch_invariant=True
            ),
            OpProvider("select_experts", PROVIDER, self.select_experts, supports, batch_invariant=True),
        )

    def pack(self, weights: tuple[torch.Tensor, torch.Tensor]) -> tuple[PackedExperts, PackedExperts]:
        """The loaded gate_up and down in the kernels' layout, in the same memory if the sizes allow it."""
        return self._packed(weights[0], weights[1], GATE_UP)

    def pack_ungated(self, weights: tuple[torch.Tensor, torch.Tensor]) -> tuple[PackedExperts, PackedExperts]:
        """The loaded up and down, likewise."""
        return self._packed(weights[0], weights[1], UP)

    def _packed(self, first: torch.Tensor, down: torch.Tensor, kind: int) -> tuple[PackedExperts, PackedExperts]:
        down = down.detach().contiguous()
        num_experts, hidden_size, inner = down.shape
        code = DTYPE_CODES[down.dtype]
        packed = []
        for matrix, weight in ((kind, first.detach().contiguous()), (DOWN, down)):
            elements = self._expert_bytes(matrix, hidden_size, inner, code) // weight.itemsize
            in_place = elements * num_experts == weight.numel()
            data = weight if in_place else torch.empty(num_experts * elements, dtype=weight.dtype)
            self._pack(matrix, weight.data_ptr(), data.data_ptr(), num_experts, hidden_size, inner, code)
            packed.append(PackedExperts(shared_weights.share("experts", data), num_experts, inner))
        return packed[0], packed[1]

    def select_experts(
        self,
        logits: torch.Tensor,
        correction: torch.Tensor | None,
        top_k: int,
        scores: str,
        normalize: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
        group_by: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and ids of each token's experts."""
        rows = rows_of(logits)
        correction = None if correction is None else correction.contiguous()
        weights = torch.empty((rows.shape[0], top_k), dtype=torch.float32)
        ids = torch.empty((rows.shape[0], top_k), dtype=torch.int64)
        self._select_experts(
            rows.data_ptr(),
            rows.stride(0),
            None if correction is None else correction.data_ptr(),
            weights.data_ptr(),
            ids.data_ptr(),
            rows.shape[0],
            rows.shape[1],
            top_k,
            SCORES.index(scores),
            normalize,
            scale,
            num_groups,
            top_groups,
            group_by == "best_two",
            DTYPE_CODES[rows.dtype],
        )
        return weights, ids

    def moe(
        self,
        x: torch.Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Sums the weighted outputs of each token's experts; rounds where the reference rounds."""
        return self._call(self._moe, x, gate_up, down, expert_ids, expert_weights)

    def gelu_tanh_moe(
        self,
        x: torch.Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Like `moe`, with GELU in its tanh approximation."""
        return self._call(self._gelu_tanh_moe, x, gate_up, down, expert_ids, expert_weights)

    def ungated_moe(
        self,
        x: torch.Tensor,
        up: PackedExperts,
        down: PackedExperts,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """Like `moe`, without gates."""
        function = FUNCTIONS.index(activation)
        return self._call(self._ungated_moe, x, up, down, expert_ids, expert_weights, function)

    def _call(
        self,
        kernel: Kernel,
        x: torch.Tensor,
        first: PackedExperts,
        down: PackedExperts,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        *options: int,
    ) -> torch.Tensor:
        rows = rows_of(x)
        out = workspace.empty(x.shape, x.dtype)
        ids, weights = expert_ids.contiguous(), expert_weights.contiguous()
        kernel(
            rows.data_ptr(),
            rows.stride(0),
            first.data.data_ptr(),
            down.data.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            down.num_experts,
            ids.shape[1],
            rows.shape[1],
            down.intermediate_size,
            *options,
            DTYPE_CODES[x.dtype],
        )
        return out

    def clamped_moe(
        self,
        x: torch.Tensor,
        gate_up: PackedExperts,
        gate_up_bias: torch.Tensor,
        down: PackedExperts,
        down_bias: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        alpha: float,
        limit: float,
    ) -> torch.Tensor:
        """Like `moe`, with biases and clamped gates."""
        rows = rows_of(x)
        out = workspace.empty(x.shape, x.dtype)
        ids, weights = expert_ids.contiguous(), expert_weights.contiguous()
        gate_up_bias, down_bias = gate_up_bias.contiguous(), down_bias.contiguous()
        self._clamped_moe(
            rows.data_ptr(),
            rows.stride(0),
            gate_up.data.data_ptr(),
            gate_up_bias.data_ptr(),
            down.data.data_ptr(),
            down_bias.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            down.num_experts,
            ids.shape[1],
            rows.shape[1],
            down.intermediate_size,
            alpha,
            limit,
            DTYPE_CODES[x.dtype],
        )
        return out
