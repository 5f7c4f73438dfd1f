"""Names of dtypes, as settings and the contract spell them, and the torch dtypes they stand for."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`, for instance `bfloat16`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"There is no dtype {name!r}.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The contract's name of `dtype`."""
    return str(dtype).removeprefix("torch.")
