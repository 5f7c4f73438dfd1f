"""The float8 formats: their identifiers in kernels and their largest values."""

from __future__ import annotations

import torch

BIAS = {torch.float8_e4m3fn: 7, torch.float8_e4m3fnuz: 8, torch.float8_e5m2: 15}
"""The exponent bias, which identifies a format in kernels."""

LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
    torch.int8: 127.0,
}
"""Largest number of each 8-bit storage dtype."""


def read_as(stored: torch.dtype, float8: torch.dtype) -> int:
    """How `numbers.widen` reads a dtype: 0 for the target's own conversion, else the exponent bias of the codes.

    Args:
        stored: Dtype of the tensor; uint8 holds codes.
        float8: The codes' format.
    """
    if stored != torch.uint8:
        return 0
    if float8 not in BIAS:
        raise ValueError(f"Codes in uint8 are of {', '.join(str(d) for d in BIAS)}; the format given is {float8}.")
    return BIAS[float8]
