"""Kernels for elementwise operations of torch that models use between this package's operations.

A step that contains an operation of torch cannot be replayed. While a step is recorded, these kernels replace torch's
sums, and products with a number. Results are bit-identical to torch's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from mvllm_cpu.paged_attention import DTYPE_CODES
from mvllm_cpu.recording import Kernel


class RecordableTorchOps:
    """The kernels, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._add = Kernel(library, "mvllm_cpu_add", (pointer, pointer, pointer, length, number))
        self._scale = Kernel(library, "mvllm_cpu_scale", (pointer, ctypes.c_float, pointer, length, number))

    def compute(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.Tensor | None:
        """The result of an operation; None if no kernel computes it.

        Args:
            name: The operation's name as torch reports it, such as `aten::add.Tensor`.
            args, kwargs: Its arguments.
        """
        if kwargs or len(args) != 2 or not _has_kernel(args[0]):
            return None
        x, other = args
        if name == "aten::add.Tensor" and _has_kernel(other) and other.shape == x.shape and other.dtype == x.dtype:
            out = torch.empty_like(x)
            self._add(x.data_ptr(), other.data_ptr(), out.data_ptr(), x.numel(), DTYPE_CODES[x.dtype])
            return out
        if name == "aten::mul.Tensor" and isinstance(other, int | float):
            out = torch.empty_like(x)
            self._scale(x.data_ptr(), other, out.data_ptr(), x.numel(), DTYPE_CODES[x.dtype])
            return out
        return None


def _has_kernel(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in DTYPE_CODES and x.is_contiguous()
