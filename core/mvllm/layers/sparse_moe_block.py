"""SparseMoeBlock: the router, the experts and optional shared experts of one mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.linear import ReplicatedLinear, leave_sums_to_caller
from mvllm.layers.routing import Routing
from mvllm.layers.weight_target import WeightTarget, whole_tensor_target


class Experts(Protocol):
    """The experts of a layer: FusedMoE and others.

    Attributes:
        hidden_size: Size of inputs and results.
        num_experts: Number of experts.
    """

    hidden_size: int
    num_experts: int

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As `FusedMoE.forward`."""


class SparseMoeBlock(nn.Module):
    """Router and experts.

    Args:
        ctx: Build context.
        router: The checkpoint module of the router, which is never quantized.
        experts: The experts.
        routing: Selects experts from the router's logits.
        bias: Whether the router has biases.
        correction: Checkpoint tensor of the correction bias for the selection, or None.
        correction_is_row: The checkpoint stores it as [1, num_experts].
        router_dtype: Dtype of the router, if it is not the compute dtype.
        shared_experts: A module whose output for every token is added, or None. It is summed over ranks with those of
            the routed experts, see `leave_sums_to_caller`.

    Raises:
        ModelError: The routing does not fit the experts.
    """

    def __init__(
        self,
        ctx: BuildContext,
        router: str,
        experts: Experts,
        routing: Routing,
        *,
        bias: bool = False,
        correction: str | None = None,
        correction_is_row: bool = False,
        router_dtype: torch.dtype | None = None,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        num_experts = experts.num_experts
        routing.check(num_experts)
        floats = ctx.floats(router_dtype)
        self.router = ReplicatedLinear(floats, router, experts.hidden_size, num_experts, bias=bias)
        self.experts = experts
        self.shared_experts = shared_experts
        facts = {"top_k": routing.top_k, "scores": routing.scores, "num_groups": routing.num_groups}
        self._select_experts = ctx.op("select_experts", num_experts=num_experts, **facts).function
        self._routing = routing.arguments()
        # In float32: rounding the biases would change the selection between close scores.
        shape = (1, num_experts) if correction_is_row else (num_experts,)
        self.correction = None if correction is None else ctx.floats(torch.float32).parameter(*shape)
        self._correction_name = correction
        self._router_dtype = floats.dtype
        self._tp = ctx.tp
        if shared_experts is not None:
            leave_sums_to_caller(shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        logits = self.router(x.to(self._router_dtype))
        correction = None if self.correction is None else self.correction.flatten()
        weights, ids = self._select_experts(logits, correction, *self._routing)
        result = self.experts(x, weights, ids)
        return self._tp.all_reduce(result if self.shared_experts is None else result + self.shared_experts(x))

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """The target of the correction bias; router and experts have their own targets."""
        if self.correction is not None and self._correction_name is not None:
            yield whole_tensor_target(self._correction_name, self.correction)
