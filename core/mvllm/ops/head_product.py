"""The operation `head_product`: each head's rows times a matrix of its own."""

from __future__ import annotations

import torch

from mvllm.ops.schema import OpSchema


def head_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows of each head times the head's matrix.

    Args:
        x: [T, num_heads, in_size], compute dtype; leading dimensions may be strided, the last is contiguous.
        weight: [num_heads, in_size, out_size], compute dtype; one of the last two dimensions is contiguous.

    Returns:
        [T, num_heads, out_size], compute dtype, maybe strided; sums in float32.
    """
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


HEAD_PRODUCT = OpSchema(
    head_product,
    facts={
        "num_heads": "heads on this rank",
        "in_size": "elements of a head before the product",
        "out_size": "elements of a head after it",
    },
)
