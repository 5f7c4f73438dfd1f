"""The operation `log_decay`: the logarithm of the decay of a delta rule's state."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


def log_decay(x: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """factors · softplus(x + bias), the `g` of `gated_delta_rule` and `kda`.

    Args:
        x: [T, width], compute dtype; rows may be strided, their elements are contiguous.
        factors: [num_heads], float32: of each head, <= 0. Each head has width / num_heads consecutive elements.
        bias: [width], float32.

    Returns:
        [T, width], float32; computed in float32.
    """
    soft = F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)) + bias)
    return (soft.unflatten(-1, (len(factors), -1)) * factors.unsqueeze(-1)).flatten(-2)


LOG_DECAY = OpSchema(log_decay, facts={"num_heads": "heads on this rank", "width": "elements of a row on this rank"})
