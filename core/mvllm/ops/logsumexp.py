"""The operation `logsumexp`: the normalizer of log-probabilities."""

from __future__ import annotations

import torch

from mvllm.ops.schema import OpSchema


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """The logarithm of the sum of the exponentials of each row.

    Args:
        logits: [n, size], compute dtype or float32; rows may be strided.

    Returns:
        float32 [n]; computed in float32 or wider. -inf for a row of -inf; NaN for a row with a NaN.
    """
    return torch.logsumexp(logits.float(), dim=1)


LOGSUMEXP = OpSchema(logsumexp, facts={"size": "elements per row"})
