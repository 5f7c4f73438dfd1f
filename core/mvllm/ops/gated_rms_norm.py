"""The operation `gated_rms_norm`: an RMS norm over groups of elements, with a gate before or after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema

ACTIVATIONS = ("silu", "sigmoid")


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    activation: str,
) -> torch.Tensor:
    """Each group of a row divided by its root mean square, times weight, with a gate.

        norm_before_gate     rms_norm(x) · weight · activation(gate)
        otherwise            rms_norm(x · activation(gate)) · weight

    Args:
        x: [T, width] or [T, heads, width], compute dtype; leading dimensions may be strided, the last is contiguous.
        gate: Like x, or None for a norm without a gate; its strides may differ from those of x.
        weight: [width], compute dtype or float32.
        eps: Added to the mean square.
        group_size: Consecutive elements that are normalised together; divides width.
        norm_before_gate: Whether the gate is multiplied after the norm.
        activation: `silu` or `sigmoid`, of the gate.

    Returns:
        Shape and dtype of `x`. Computed in float32 and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    function = F.silu if activation == "silu" else torch.sigmoid
    factor = None if gate is None else function(gate.to(wide))
    y = x.to(wide)
    if factor is not None and not norm_before_gate:
        y = y * factor
    groups = y.unflatten(-1, (-1, group_size))
    y = (groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)).flatten(-2) * weight.to(wide)
    if factor is not None and norm_before_gate:
        y = y * factor
    return y.to(x.dtype)


GATED_RMS_NORM = OpSchema(
    gated_rms_norm,
    facts={
        "width": "elements of a row on this rank",
        "group_size": "as the parameter",
        "norm_before_gate": "as the parameter",
        "activation": "as the parameter",
    },
)
