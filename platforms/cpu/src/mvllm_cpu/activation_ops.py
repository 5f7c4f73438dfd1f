"""Activations, layer norms, the decay of delta rules, and products with one matrix per head, with the compiled kernels.

Torch computes them as fast, but a decode step that calls torch is not recorded (`replay.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mvllm.plugin_api import OpProvider
from mvllm_cpu import workspace
from mvllm_cpu.ops import PROVIDER, rows_of, supports
from mvllm_cpu.paged_attention import DTYPE_CODES
from mvllm_cpu.recording import Kernel

FUNCTIONS = ("relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "sigmoid")
"""In the order of `Activation` in csrc/activations.h; each is an operation."""

MOST_TOKENS = 64
"""Tokens up to which a product with one matrix per head is limited by memory. Torch multiplies more of them faster."""


class ActivationOps:
    """The operations, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        rows = (pointer, length)
        activate = (*rows, *rows, pointer, length, length, number, number)
        self._activate = Kernel(library, "mvllm_cpu_activate", activate)
        norm = (*rows, pointer, pointer, pointer, length, length, ctypes.c_float, number)
        self._layer_norm = Kernel(library, "mvllm_cpu_layer_norm", norm)
        self._add = Kernel(library, "mvllm_cpu_add", (pointer, pointer, pointer, length, number))
        decay = (*rows, pointer, pointer, pointer, length, length, length, number)
        self._log_decay = Kernel(library, "mvllm_cpu_log_decay", decay)
        product = (*rows, length, pointer, *(length,) * 3, pointer, *(length,) * 4, number)
        self._head_product = Kernel(library, "mvllm_cpu_head_product", product)

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        functions: dict[str, Callable[..., Any]] = {
            **{name: self._activation(code) for code, name in enumerate(FUNCTIONS)},
            "gelu_and_mul": self.gelu_and_mul,
            "layer_norm": self.layer_norm,
            "fused_add_layer_norm": self.fused_add_layer_norm,
            "log_decay": self.log_decay,
        }
        return [
            *(OpProvider(name, PROVIDER, f, supports, batch_invariant=True) for name, f in functions.items()),
            OpProvider("head_product", PROVIDER, self.head_product, supports),
        ]

    def _activation(self, function: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def activate(x: torch.Tensor) -> torch.Tensor:
            rows = rows_of(x)
            out = workspace.empty(x.shape, x.dtype)
            self._call(function, rows, None, out)
            return out

        return activate

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """gelu of the first half times the second half."""
        gate, up = rows_of(x).chunk(2, dim=-1)
        out = workspace.empty((*x.shape[:-1], gate.shape[1]), x.dtype)
        self._call(FUNCTIONS.index("gelu"), gate, up, out)
        return out

    def _call(self, function: int, x: torch.Tensor, other: torch.Tensor | None, out: torch.Tensor) -> None:
        self._activate(
            x.data_ptr(),
            x.stride(0),
            None if other is None else other.data_ptr(),
            0 if other is None else other.stride(0),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            function,
            DTYPE_CODES[x.dtype],
        )

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """(x - mean) / standard deviation, times weight, plus bias."""
        rows = rows_of(x)
        out = workspace.empty(x.shape, x.dtype)
        self._layer_norm(
            rows.data_ptr(),
            rows.stride(0),
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            rows.shape[1],
            eps,
            DTYPE_CODES[x.dtype],
        )
        return out

    def fused_add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x to the residual stream, in place, and normalizes the sum.

        Two kernels. They save the threads of torch's sum, which would wait where the team's threads run next.
        """
        x, residual = x.contiguous(), residual.contiguous()
        at = residual.data_ptr()
        self._add(at, x.data_ptr(), at, x.numel(), DTYPE_CODES[x.dtype])
        return self.layer_norm(residual, weight, bias, eps), residual

    def log_decay(self, x: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """factors · softplus(x + bias), float32."""
        x = rows_of(x)
        out = workspace.empty(x.shape, torch.float32)
        self._log_decay(
            x.data_ptr(),
            x.stride(0),
            factors.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            x.shape[1] // len(factors),
            DTYPE_CODES[x.dtype],
        )
        return out

    def head_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The rows of each head times the head's matrix."""
        if len(x) > MOST_TOKENS:
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
        if x.stride(2) != 1:
            x = x.contiguous()
        if 1 not in weight.stride()[1:]:
            weight = weight.contiguous()
        num_heads, in_size, out_size = weight.shape
        out = workspace.empty((len(x), num_heads, out_size), x.dtype)
        self._head_product(
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            weight.data_ptr(),
            *weight.stride(),
            out.data_ptr(),
            len(x),
            num_heads,
            in_size,
            out_size,
            DTYPE_CODES[x.dtype],
        )
        return out
