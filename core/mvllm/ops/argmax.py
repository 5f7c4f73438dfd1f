"""The operation `argmax`: the largest element of each row, for greedy sampling."""

from __future__ import annotations

import torch

from mvllm.ops.schema import OpSchema


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest element of each row, and its index.

    Args:
        x: [n, size], compute dtype; rows may be strided. A NaN is larger than any number.

    Returns:
        Elements [n], compute dtype, and their indices in the row, int64 [n]. Among equal elements any may be returned,
        the same one for equal rows.
    """
    values, ids = x.max(dim=1)
    return values, ids


ARGMAX = OpSchema(argmax, facts={"size": "elements per row"}, is_exact=True)
