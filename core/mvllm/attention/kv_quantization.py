"""8-bit keys and values, with a scale for each token and head.

The largest magnitude of a token's key (or value) of one head maps to the largest number of the storage dtype:

    scale[token, head] = max(|x|) / largest        code = round(x / scale)        x ~ code * scale

So there is no calibration, the code of a token does not depend on other tokens, and an outlier costs precision in its
own vector alone. The error of an element is at most 1/254 of the vector's maximum in int8, and 1/16 of the element (or
1/2^18 of the maximum, if that is more) in float8_e4m3fn.
"""

from __future__ import annotations

import torch

from mvllm.ops.dtypes import torch_dtype

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Storage dtypes that have scales, and the largest number of each."""

STORED_AS = {"int8": torch.int8, "float8_e4m3fn": torch.uint8}
"""The dtype of the codes. float8 is stored as bytes, because few torch operations support it."""


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
    """Decodes codes [..., size] and scales [...] of `encode` to float32 vectors [..., size]."""
    if kv_dtype != "int8":
        codes = codes.view(torch.float8_e4m3fn)
    return codes.float() * scales.unsqueeze(-1)


def round_to_kv_dtype(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """Vectors [..., size] as a cache of the dtype, with scales or without, returns them: float32."""
    if kv_dtype in LARGEST:
        return decode(*encode(x, kv_dtype), kv_dtype)
    return x.to(torch_dtype(kv_dtype)).float()
