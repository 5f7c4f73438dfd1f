"""Linear layers in bfloat16 with oneDNN; weights are packed once after loading into oneDNN's blocked layout.

torch.nn.functional.linear does not pack the weight, which is about two times slower with few rows (decode). Used if the
compiled kernel of linear.py is not available or not the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mvllm.plugin_api import OpCase, OpProvider

ROWS_PACKED_FOR = 32
"""Number of rows that the packing is tuned for; other numbers work as well."""


def providers() -> Sequence[OpProvider]:
    """The provider, if this torch build and this processor support it."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ()
    return (OpProvider("linear", "onednn_packed", linear, supports, prepare=pack),)


def supports(case: OpCase) -> list[str]:
    """Reasons why a case is not supported."""
    if case.dtype != "bfloat16":
        return [f"only bfloat16 weights are packed, these are {case.dtype}"]
    return []


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out_features, in_features] in oneDNN's blocked layout; only `linear` can read it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS_PACKED_FOR)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
