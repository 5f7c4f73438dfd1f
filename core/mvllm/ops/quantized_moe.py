"""The operations `quantized_moe` and `quantized_ungated_moe`: the experts of a mixture, with quantized weights.

An expert's matrices are weights of `quantized_linear`, `float8_linear` or `block_quantized_linear`, and are multiplied
as those operations define it, inputs included. `quantized_moe` serves all of them, with and without biases and clamped
gates; `quantized_ungated_moe` serves experts without a gate.

No layer runs a reference: without a provider, `moe`, `clamped_moe` or `ungated_moe` multiplies with the dequantized
experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mvllm.ops.block_quantized_linear import BlockQuantizedWeight, block_quantized_linear
from mvllm.ops.float8_linear import Float8Weight, float8_linear
from mvllm.ops.moe import clamped_gate, expert_shares, ungated_activation
from mvllm.ops.quantized_linear import QuantizedWeight, quantized_linear
from mvllm.ops.schema import OpSchema

ExpertWeight = QuantizedWeight | Float8Weight | BlockQuantizedWeight
"""One matrix of one expert."""


def quantized_moe(
    x: torch.Tensor,
    gate_up: Sequence[ExpertWeight],
    gate_up_bias: torch.Tensor | None,
    down: Sequence[ExpertWeight],
    down_bias: torch.Tensor | None,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    alpha: float | None,
    limit: float | None,
) -> torch.Tensor:
    """Sums, for each token, the weighted outputs of the experts that it is routed to; their weights are quantized.

    The inner elements are those of `moe`, silu(gate) · up, or with `alpha` and `limit` those of `clamped_moe`.

    Args:
        x: [T, hidden_size], compute dtype.
        gate_up: For each expert a weight [2 · intermediate_size, hidden_size], gate rows first. All are of one class,
            in one format.
        gate_up_bias: [num_experts, 2 · intermediate_size], compute dtype, or None.
        down: For each expert a weight [hidden_size, intermediate_size]; likewise. A provider's `prepare` takes the pair
            (gate_up, down) and returns the pair that `function` takes. The items of the sequences may be made when they
            are accessed, so that few exist at a time: `prepare` accesses each once, in order, and keeps none.
        down_bias: [num_experts, hidden_size], compute dtype; None exactly where gate_up_bias is None.
        expert_ids: [T, top_k], int64, distinct within a row.
        expert_weights: [T, top_k], float32.
        alpha: Steepness of the sigmoid of clamped gates; None for silu.
        limit: Bound of clamped gates, > 0; None exactly where alpha is None.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32. A token's result does not depend on the other tokens.
    """
    share = expert_shares(len(gate_up), expert_ids, expert_weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        gate, up = _linear(x, gate_up[expert], bias).chunk(2, dim=-1)
        if alpha is None or limit is None:
            inner = torch.nn.functional.silu(gate) * up
        else:
            inner = clamped_gate(gate, up, alpha, limit)
        result = _linear(inner, down[expert], None if down_bias is None else down_bias[expert])
        total += result.float() * share[:, expert, None]
    return total.to(x.dtype)


def quantized_ungated_moe(
    x: torch.Tensor,
    up: Sequence[ExpertWeight],
    down: Sequence[ExpertWeight],
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Sums, for each token, the weighted outputs of experts without a gate; their weights are quantized.

    The inner elements are those of `ungated_moe`.

    Args:
        x: [T, hidden_size], compute dtype.
        up: For each expert a weight [intermediate_size, hidden_size]. All are of one class, in one format.
        down: For each expert a weight [hidden_size, intermediate_size]; likewise. A provider's `prepare` takes the pair
            (up, down) and returns the pair that `function` takes. The items of the sequences may be made when they are
            accessed, so that few exist at a time: `prepare` accesses each once, in order, and keeps none.
        expert_ids: [T, top_k], int64, distinct within a row.
        expert_weights: [T, top_k], float32.
        activation: As in `ungated_moe`.

    Returns:
        [T, hidden_size], compute dtype; accumulated in float32. A token's result does not depend on the other tokens.
    """
    share = expert_shares(len(up), expert_ids, expert_weights)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(up)):
        inner = ungated_activation(_linear(x, up[expert], None), activation)
        total += _linear(inner, down[expert], None).float() * share[:, expert, None]
    return total.to(x.dtype)


def _linear(x: torch.Tensor, weight: ExpertWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, bias)
    if isinstance(weight, Float8Weight):
        return float8_linear(x, weight, bias)
    return block_quantized_linear(x, weight, bias)


_FACTS = {
    "num_experts": "experts on this rank",
    "top_k": "experts per token",
    "hidden_size": "elements per token",
    "intermediate_size": "inner size of one expert on this rank",
}

QUANTIZED_MOE = OpSchema(
    quantized_moe,
    facts={
        **_FACTS,
        "bias": "whether there are biases",
        "clamped": "whether gates are clamped (alpha and limit) or silu",
        "linear": "the operation whose weights the experts have, for instance 'block_quantized_linear'",
        "gate_up": "further facts of that operation for gate_up: a tuple of (name, value), sorted by name",
        "down": "likewise for down",
    },
    replaces_others=True,
)

QUANTIZED_UNGATED_MOE = OpSchema(
    quantized_ungated_moe,
    facts={
        **_FACTS,
        "activation": "as the parameter",
        "linear": "the operation whose weights the experts have, for instance 'block_quantized_linear'",
        "up": "further facts of that operation for up: a tuple of (name, value), sorted by name",
        "down": "likewise for down",
    },
    replaces_others=True,
)
