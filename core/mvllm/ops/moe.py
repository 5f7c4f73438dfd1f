"""The operations `moe`, `gelu_tanh_moe`, `clamped_moe` and `ungated_moe`: the experts of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
        gate_up: [num_experts, 2 · intermediate_size, hidden_size], compute dtype, gate rows first.
        down: [num_experts, hidden_size, intermediate_size], compute dtype. A provider's `prepare` takes the
            pair (gate_up, down) and returns the pair that `function` takes.
        expert_ids: [T, top_k], int64, distinct within a row.
        expert_weights: [T, top_k], float32.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32.
    """
    return _gated_experts(x, gate_up, down, expert_ids, expert_weights, F.silu)


def gelu_tanh_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
) -> torch.Tensor:
    """As `moe`, with GELU in its tanh approximation as the activation of the gates.

    Args:
        x: [T, hidden_size], compute dtype.
        gate_up: [num_experts, 2 · intermediate_size, hidden_size], compute dtype, gate rows first.
        down: [num_experts, hidden_size, intermediate_size], compute dtype. A provider's `prepare` takes the
            pair (gate_up, down) and returns the pair that `function` takes.
        expert_ids: [T, top_k], int64, distinct within a row.
        expert_weights: [T, top_k], float32.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32.
    """
    return _gated_experts(x, gate_up, down, expert_ids, expert_weights, partial(F.gelu, approximate="tanh"))


def _gated_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    share = expert_shares(gate_up.shape[0], expert_ids, expert_weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        gate, up = F.linear(x, gate_up[expert]).chunk(2, dim=-1)
        total += F.linear(act(gate) * up, down[expert]).float() * share[:, expert, None]
    return total.to(x.dtype)


def clamped_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Sums, for each token, the weighted outputs of experts with biases and clamped gates.

        gate = min(gate, limit)    up = max(-limit, min(up, limit))    inner = (up + 1) · gate · sigmoid(alpha · gate)

    Args:
        x: [T, hidden_size], compute dtype.
        gate_up: [num_experts, 2 · intermediate_size, hidden_size], compute dtype, gate rows first.
        gate_up_bias: [num_experts, 2 · intermediate_size], compute dtype.
        down: [num_experts, hidden_size, intermediate_size], compute dtype. A provider's `prepare` takes the
            pair (gate_up, down) and returns the pair that `function` takes.
        down_bias: [num_experts, hidden_size], compute dtype.
        expert_ids: [T, top_k], int64, distinct within a row.
        expert_weights: [T, top_k], float32.
        alpha: Steepness of the sigmoid.
        limit: Upper bound of gates, and bound of the magnitude of up; > 0.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32.
    """
    share = expert_shares(gate_up.shape[0], expert_ids, expert_weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        gate, up = F.linear(x, gate_up[expert], gate_up_bias[expert]).chunk(2, dim=-1)
        inner = clamped_gate(gate, up, alpha, limit)
        total += F.linear(inner, down[expert], down_bias[expert]).float() * share[:, expert, None]
    return total.to(x.dtype)


def ungated_moe(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Sums, for each token, the weighted outputs down · f(up · x) of the experts that it is routed to.

    Args:
        x: [T, hidden_size], compute dtype.
        up: [num_experts, intermediate_size, hidden_size], compute dtype.
        down: [num_experts, hidden_size, intermediate_size], compute dtype. A provider's `prepare` takes the pair
            (up, down) and returns the pair that `function` takes.
        expert_ids: [T, top_k], int64, distinct within a row.
        expert_weights: [T, top_k], float32.
        activation: f, `relu`, `relu_squared` or `silu`.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32.
    """
    share = expert_shares(up.shape[0], expert_ids, expert_weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(up.shape[0]):
        inner = ungated_activation(F.linear(x, up[expert]), activation)
        total += F.linear(inner, down[expert]).float() * share[:, expert, None]
    return total.to(x.dtype)


UNGATED_ACTIVATIONS = ("relu", "relu_squared", "silu")
"""Values of `activation` of `ungated_moe`."""


def ungated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The inner elements of `ungated_moe`."""
    if activation == "silu":
        return F.silu(x)
    return F.relu(x).square() if activation == "relu_squared" else F.relu(x)


def clamped_gate(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The inner elements of `clamped_moe`."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def expert_shares(num_experts: int, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
    """The weight of every expert for every token, [T, num_experts]; zero if it was not selected.

    Reading the routing would make the host wait for the device, so in the references every expert computes every
    token.
    """
    share = torch.zeros(expert_ids.shape[0], num_experts, dtype=torch.float32, device=expert_ids.device)
    return share.scatter_(1, expert_ids, expert_weights)


_FACTS = {
    "num_experts": "experts on this rank",
    "top_k": "experts per token",
    "hidden_size": "elements per token",
    "intermediate_size": "inner size of one expert on this rank",
}

MOE = OpSchema(moe, facts=_FACTS)
GELU_TANH_MOE = OpSchema(gelu_tanh_moe, facts=_FACTS)
CLAMPED_MOE = OpSchema(clamped_moe, facts=_FACTS)
UNGATED_MOE = OpSchema(ungated_moe, facts={**_FACTS, "activation": "as the parameter"})
