"""Operations that the compiled kernels replace: each is one call where torch needs several passes over the data.

They round to the compute dtype where the references do, so a model's results do not depend on which of the two ran, up
to the order of a sum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mvllm.plugin_api import OpCase, OpProvider
from mvllm_cpu.paged_attention import DTYPE_CODES, DTYPES

PROVIDER = "mvllm_cpu"


def supports(case: OpCase) -> list[str]:
    """Reasons why the kernels do not take a case."""
    if case.dtype not in DTYPES:
        return [f"dtype {case.dtype} has no kernel (there are kernels for {', '.join(DTYPES)})"]
    return []


class KernelOps:
    """The operations, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._rms_norm = library.mvllm_cpu_rms_norm
        self._rms_norm.argtypes = (
            *(pointer, length, pointer, pointer, pointer),
            *(length, length, number, ctypes.c_float),
        )
        self._silu_and_mul = library.mvllm_cpu_silu_and_mul
        self._silu_and_mul.argtypes = [pointer, length, pointer, length, length, number]
        self._rotary = library.mvllm_cpu_rotary
        heads = (pointer, length, length, number)
        self._rotary.argtypes = (pointer, number, pointer, number, *heads, *heads, length, number)
        for function in (self._rms_norm, self._silu_and_mul, self._rotary):
            function.restype = None

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        functions = (self.rms_norm, self.fused_add_rms_norm, self.silu_and_mul, self.rotary_embedding)
        return [OpProvider(f.__name__, PROVIDER, f, supports) for f in functions]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x divided by its root mean square, times weight."""
        size = x.shape[-1]
        rows = rows_of(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            None,
            weight.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            size,
            DTYPE_CODES[x.dtype],
            eps,
        )
        return out

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x to the residual stream, in place, and normalises the sum."""
        if not residual.is_contiguous():
            residual = residual.contiguous()
        x = rows_of(x)
        out = torch.empty_like(residual)
        self._rms_norm(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            DTYPE_CODES[x.dtype],
            eps,
        )
        return out, residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu of the first half times the second half."""
        size = x.shape[-1] // 2
        rows = rows_of(x)
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
        self._silu_and_mul(rows.data_ptr(), rows.stride(0), out.data_ptr(), rows.shape[0], size, DTYPE_CODES[x.dtype])
        return out

    def rotary_embedding(
        self, index: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries and keys in place."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        if key.stride(-1) != 1:
            key = key.contiguous()
        self._rotary(
            index.data_ptr(),
            index.dtype == torch.int64,
            cos_sin.data_ptr(),
            cos_sin.shape[1],
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            query.shape[1],
            key.data_ptr(),
            key.stride(0),
            key.stride(1),
            key.shape[1],
            query.shape[0],
            DTYPE_CODES[query.dtype],
        )
        return query, key


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as [rows, size]: strided rows stay where they are, anything else is copied."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
