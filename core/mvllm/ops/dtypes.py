"""Names of dtypes, as settings and contracts spell them, and torch's objects for them."""

from __future__ import annotations

import torch

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int8": torch.int8,
}


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype called `name`.

    Raises:
        KeyError: Core knows no dtype of that name.
    """
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that settings use for `dtype`."""
    return str(dtype).removeprefix("torch.")
