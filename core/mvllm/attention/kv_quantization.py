"""Keys and values in 8 bits, with a scale for each token and head.

The largest magnitude of a token's key (or value) of one head becomes the largest number of the storage dtype:

    scale[token, head] = max(|x|) / largest        code = round(x / scale)        x ~ code * scale

So there is nothing to calibrate, a token is stored the same whatever stands beside it, and an outlier costs precision
in its own vector alone. An element is off by at most 1/254 of the largest of its vector in int8, and by 1/16 of itself
(or 1/2^18 of the largest, where that is more) in float8_e4m3fn.
"""

from __future__ import annotations

import torch

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Storage dtypes that come with scales, and the largest number of each."""

STORED_AS = {"int8": torch.int8, "float8_e4m3fn": torch.uint8}
"""What holds the codes: few operations of torch take float8, so its bits are kept as bytes."""


def encode(x: torch.Tensor, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of vectors.

    Args:
        x: [..., size], any floating-point dtype.
        kv_dtype: A name in LARGEST.

    Returns:
        Codes [..., size] in the dtype of STORED_AS, and scales float32 [...]. A vector with a NaN has a scale of NaN.
    """
    x = x.float()
    scales = x.abs().amax(dim=-1) / LARGEST[kv_dtype]
    normal = x / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    if kv_dtype == "int8":
        return normal.round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8), scales
    return normal.to(torch.float8_e4m3fn).view(torch.uint8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """The float32 vectors [..., size] that `encode` made into codes [..., size] and scales [...]."""
    if kv_dtype != "int8":
        codes = codes.view(torch.float8_e4m3fn)
    return codes.float() * scales.unsqueeze(-1)
