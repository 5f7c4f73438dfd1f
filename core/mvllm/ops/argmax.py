"""The largest element of each row: what greedy sampling asks of the logits."""

from __future__ import annotations

import torch

from mvllm.ops.schema import OpSchema


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest element of each row, and where it is.

    Args:
        x: [n, size], compute dtype; rows may be strided. A NaN is larger than any number.

    Returns:
        Elements [n], compute dtype, and their places in the row, int64 [n]. Among equal ones any may be taken, the same
        one for equal rows.
    """
    values, ids = x.max(dim=1)
    return values, ids


ARGMAX = OpSchema(argmax, facts={"size": "elements per row"})
