"""NumPy arrays from torch tensors and back. Dtypes that NumPy lacks are arrays of their bits."""

from __future__ import annotations

import numpy as np
import torch

from mvllm.ops.dtypes import torch_dtype

_BITS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


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
        wide = array.astype(np.uint32)
        wide <<= 16
        array = wide.view(np.float32)
    indices = array.argmax(axis=1)
    values: np.ndarray = array[np.arange(len(array)), indices]
    return values.astype(np.float32, copy=False), indices
