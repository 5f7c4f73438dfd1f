"""NumPy arrays from torch tensors and back. Dtypes that NumPy lacks are arrays of their bits."""

from __future__ import annotations

import numpy as np
import torch

from mvllm.extension_api.models import torch_dtype

_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}

_INFINITY, _MINUS_INFINITY = 0x7F80, 0xFF80
"""Bits of bfloat16. Those of NaN are larger, for each sign."""


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous array of a host tensor's elements; it shares the memory of a contiguous tensor."""
    tensor = tensor.detach().contiguous()
    bits = _BITS.get(tensor.dtype)
    array: np.ndarray = (tensor if bits is None else tensor.view(bits)).numpy()
    return array


def to_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """The tensor of an array whose elements have a dtype of `Value.dtype`; shares its memory."""
    tensor, wanted = torch.from_numpy(array), torch_dtype(dtype)
    return tensor.view(wanted) if wanted in _BITS else tensor


def largest_of_rows(array: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The largest element of each row, and its index: the operation `argmax` of host arrays.

    The first of equal elements is found, and the first NaN of a row that has one; so does torch on the host.

    Args:
        array: [n, size]: elements of a floating dtype.
        dtype: That dtype, as in `Value.dtype`.

    Returns:
        Elements, float32 [n], and indices, int64 [n].
    """
    if dtype == "bfloat16":
        if (found := _largest_positive(array)) is not None:
            return found
        array = _widened(array)
    indices = array.argmax(axis=1)
    values: np.ndarray = array[np.arange(len(array)), indices]
    return values.astype(np.float32, copy=False), indices


def _widened(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16, from its bits."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _largest_positive(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """`largest_of_rows` of bfloat16, from its bits; None if a row has no positive number, or NaN.

    Positive numbers have the order of their bits, so the rows are read as integers, without a copy.
    """
    indices = bits.view(np.int16).argmax(axis=1)
    if len(bits) == 1:  # one request: each array that NumPy gathers costs as much as reading the row
        values = [bits.item(0, indices.item())]
        most = bits.item(0, bits.argmax())
    else:
        values, most = bits[np.arange(len(bits)), indices].tolist(), int(bits.max())
    if most > _MINUS_INFINITY or not all(0 < value <= _INFINITY for value in values):
        return None
    return np.array([value << 16 for value in values], dtype=np.uint32).view(np.float32), indices
