"""Kernels for operations of torch that models use between this package's operations.

A step that contains an operation of torch cannot be replayed. While a step is recorded, these kernels replace torch's

    x + y, x * 2.5                    elementwise
    x * factors                       one factor for each row: x [T, ...], factors [T, 1, ...]
    x.to(dtype)                       between float32 and bfloat16
    x.index_select(-1, order)         the elements of each head in another order: x [T, heads, size]

Results are bit-identical to torch's, except for the bits of NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from mvllm_cpu.paged_attention import DTYPE_CODES
from mvllm_cpu.recording import Kernel

_CONVERTED = (torch.float32, torch.bfloat16)


class RecordableTorchOps:
    """The kernels, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._add = Kernel(library, "mvllm_cpu_add", (pointer, pointer, pointer, length, number))
        self._scale = Kernel(library, "mvllm_cpu_scale", (pointer, ctypes.c_float, pointer, length, number))
        rows = (pointer, length, pointer, length, length, number, number)
        self._convert = Kernel(library, "mvllm_cpu_convert", rows)
        factors = (pointer, length, pointer, pointer, length, length, number)
        self._scale_rows = Kernel(library, "mvllm_cpu_scale_rows", factors)
        heads = (pointer, length, length, length, pointer, pointer, length, length, number)
        self._take_columns = Kernel(library, "mvllm_cpu_take_columns", heads)
        self._functions: dict[str, tuple[Callable[..., torch.Tensor | None], int]] = {
            "aten::add.Tensor": (self._sum, 2),
            "aten::mul.Tensor": (self._product, 2),
            "aten::to.dtype": (self._converted, 2),
            "aten::index_select": (self._in_order, 3),
        }

    def compute(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.Tensor | None:
        """The result of an operation; None if no kernel computes it.

        Args:
            name: The operation's name as torch reports it, such as `aten::add.Tensor`.
            args, kwargs: Its arguments.
        """
        if name == "aten::_to_copy" and kwargs and [*kwargs] == ["dtype"]:
            return self._converted(args[0], kwargs["dtype"])
        known = self._functions.get(name)
        if known is None or kwargs or len(args) != known[1]:
            return None
        return known[0](*args)

    def _sum(self, x: Any, other: Any) -> torch.Tensor | None:
        if not _has_kernel(x) or not _has_kernel(other) or other.shape != x.shape or other.dtype != x.dtype:
            return None
        out = torch.empty_like(x)
        self._add(x.data_ptr(), other.data_ptr(), out.data_ptr(), x.numel(), DTYPE_CODES[x.dtype])
        return out

    def _product(self, x: Any, other: Any) -> torch.Tensor | None:
        if isinstance(other, int | float):
            if not _has_kernel(x):
                return None
            out = torch.empty_like(x)
            self._scale(x.data_ptr(), other, out.data_ptr(), x.numel(), DTYPE_CODES[x.dtype])
            return out
        if not isinstance(x, torch.Tensor) or not isinstance(other, torch.Tensor):
            return None
        rows, factors = (other, x) if x.dim() > 1 and _is_column(x) else (x, other)
        if not _is_rows(rows) or not _is_column(factors) or not factors.is_contiguous():
            return None
        if factors.dim() != rows.dim() or len(factors) != len(rows) or factors.dtype != rows.dtype:
            return None
        out = torch.empty(rows.shape, dtype=rows.dtype)
        self._scale_rows(
            rows.data_ptr(),
            rows.stride(0),
            factors.data_ptr(),
            out.data_ptr(),
            len(rows),
            rows[0].numel(),
            DTYPE_CODES[rows.dtype],
        )
        return out

    def _converted(self, x: Any, dtype: Any) -> torch.Tensor | None:
        if not _is_rows(x) or dtype not in _CONVERTED or dtype == x.dtype:
            return None
        out, codes = torch.empty(x.shape, dtype=dtype), (DTYPE_CODES[x.dtype], DTYPE_CODES[dtype])
        self._convert(x.data_ptr(), x.stride(0), out.data_ptr(), len(x), x[0].numel(), *codes)
        return out

    def _in_order(self, x: Any, dim: Any, order: Any) -> torch.Tensor | None:
        if not isinstance(x, torch.Tensor) or x.dtype not in DTYPE_CODES or x.dim() != 3 or dim not in (-1, 2):
            return None
        if x.stride(2) != 1 or order.dtype != torch.int64 or not order.is_contiguous() or not x.numel():
            return None
        out = torch.empty((*x.shape[:2], len(order)), dtype=x.dtype)
        self._take_columns(
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            x.stride(1),
            order.data_ptr(),
            out.data_ptr(),
            len(x),
            len(order),
            x.element_size(),
        )
        return out


def _has_kernel(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in DTYPE_CODES and x.is_contiguous()


def _is_rows(x: Any) -> bool:
    """Whether it has contiguous rows of a dtype that can be converted."""
    return (
        isinstance(x, torch.Tensor) and x.dtype in _CONVERTED and x.dim() > 1 and bool(len(x)) and x[0].is_contiguous()
    )


def _is_column(x: torch.Tensor) -> bool:
    return x.dim() > 0 and x.numel() == len(x)
