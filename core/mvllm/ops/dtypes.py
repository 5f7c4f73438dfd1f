"""Conversion between dtype names of settings and contract, and torch dtypes."""

from __future__ import annotations

import torch

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`, for instance `bfloat16`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"There is no dtype {name!r}.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The contract's name of `dtype`."""
    return str(dtype).removeprefix("torch.")
