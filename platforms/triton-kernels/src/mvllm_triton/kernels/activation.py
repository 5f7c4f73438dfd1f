"""Kernel of gated activations: a program computes one block of columns of a row."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mvllm_triton.kernels.numbers import tanh

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)


@triton.jit
def activate(x, FUNCTION: tl.constexpr):
    """An activation of float32 numbers."""
    if FUNCTION == SILU:
        y = x / (1.0 + tl.exp(-x))
    elif FUNCTION == GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return y


def _kernel_name(specialization: Any) -> str:
    """The name of the compiled kernel, which profilers print."""
    return ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")[specialization.constants["FUNCTION"]]


@triton.jit(repr=_kernel_name)
def act_and_mul(
    out,  # [rows, size], contiguous
    x,  # [rows, 2 * size]
    row_stride,
    size,
    FUNCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    # Rounded before the product, as two separate operations would do.
    active = activate(gate, FUNCTION).to(DTYPE).to(tl.float32)
    tl.store(out + row * size + column, (active * up).to(DTYPE), mask=mask)
