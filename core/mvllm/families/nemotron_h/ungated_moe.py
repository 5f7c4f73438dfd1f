"""UngatedMoE: FusedMoE for experts of two matrices, without a gate.

Quantized experts stay quantized if the platform supports `quantized_ungated_moe`.
"""

from __future__ import annotations

import torch

from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.ops.moe import UNGATED_ACTIVATIONS


class UngatedMoE(FusedMoE):
    """Experts down(f(up(x))).

    Args:
        ctx: Build context.
        name: The checkpoint module whose children `0`, `1`, ... are the experts, with up_proj and down_proj.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        act: The activation f, by its name in checkpoints.
        num_experts, top_k: Number of experts, and experts per token.

    Raises:
        ModelError: The activation is not supported in experts.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        *,
        num_experts: int,
        top_k: int,
    ) -> None:
        activation = ACTIVATIONS.get(act, act)
        if activation not in UNGATED_ACTIVATIONS:
            raise ModelError(
                f"{name}: the activation {act!r} is not supported in experts without a gate. Supported: "
                f"{', '.join(key for key, value in ACTIVATIONS.items() if value in UNGATED_ACTIVATIONS)}."
            )
        super().__init__(
            ctx,
            name,
            hidden_size,
            intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            names=("up_proj", "down_proj"),
            op="ungated_moe",
            activation=activation,
        )
        self._activation = activation

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As FusedMoE.forward."""
        return self._moe(x, self.gate_up, self.down, ids, weights, self._activation)
