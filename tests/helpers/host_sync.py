"""Detects operations that make the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ASK_THE_DEVICE = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")
_READ_HERE = (
    "numpy",
    "tolist",
    "item",
    "cpu",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "data_ptr",
)


class ForbidSynchronizingOps(TorchDispatchMode):
    """Raises on operations whose result or shape the host must read from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ())
        )
        assert name not in _ASK_THE_DEVICE and not by_mask, f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


class ForbidHostReads(TorchFunctionMode):
    """Raises on calls that read values of device tensors on the host.

    Complements ForbidSynchronizingOps when device tensors are host tensors: their `tolist` dispatches no operation.

    Args:
        is_host: Whether a tensor may be read.
    """

    def __init__(self, is_host: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_host = is_host

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READ_HERE and not self._is_host(args[0]):
            raise AssertionError(f"Tensor.{name} reads a tensor of the device that was not copied to the host")
        return func(*args, **(kwargs or {}))
