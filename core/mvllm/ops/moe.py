"""The experts of a mixture-of-experts layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mvllm.ops.schema import OpSchema


def moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
) -> torch.Tensor:
    """Sums, for each token, the weighted outputs of the gated MLPs that it is routed to.

    Args:
        x: [T, hidden_size], compute dtype.
        gate_up: [num_experts, 2 · intermediate_size, hidden_size], gate rows first.
        down: [num_experts, hidden_size, intermediate_size]. A provider's `prepare` takes the pair (gate_up, down) and
            returns what `function` wants in the place of each.
        expert_ids: [T, top_k], int64, distinct within a row.
        expert_weights: [T, top_k], float32.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32.
    """
    # Every expert sees every token, weighted by zero where it was not chosen: which tokens an expert gets is data, and
    # looking at it would make the host wait for the device.
    share = torch.zeros(x.shape[0], gate_up.shape[0], dtype=torch.float32, device=x.device)
    share.scatter_(1, expert_ids, expert_weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        gate, up = F.linear(x, gate_up[expert]).chunk(2, dim=-1)
        total += F.linear(F.silu(gate) * up, down[expert]).float() * share[:, expert, None]
    return total.to(x.dtype)


MOE = OpSchema(
    moe,
    facts={
        "num_experts": "experts on this rank",
        "top_k": "experts per token",
        "hidden_size": "elements per token",
        "intermediate_size": "inner size of one expert on this rank",
    },
)
