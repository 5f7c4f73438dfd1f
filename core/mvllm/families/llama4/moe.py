"""Llama 4's experts: a token's router score scales the input of its expert, not the output.

    x ─ router ─> expert and score        expert(sigmoid(score) · x) + shared_expert(x)

Each row of the experts' input is for one expert.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.linear import ReplicatedLinear, leave_sums_to_caller
from mvllm.layers.routing import Routing


class Llama4MoE(nn.Module):
    """Router, routed experts and the shared expert of one layer.

    Args:
        ctx: Build context.
        router: The checkpoint module of the router, which is never quantized.
        experts: The routed experts, one for each row of their input.
        shared_expert: A module whose output for every token is added; see `leave_sums_to_caller`.
        top_k: Experts per token.

    Raises:
        ModelError: There are fewer experts than `top_k`.
    """

    def __init__(self, ctx: BuildContext, router: str, experts: FusedMoE, shared_expert: nn.Module, top_k: int) -> None:
        super().__init__()
        scores, best = Routing(top_k, "sigmoid"), Routing(top_k, "softmax_of_chosen")
        scores.check(experts.num_experts)
        self.router = ReplicatedLinear(ctx.floats(), router, experts.hidden_size, experts.num_experts, bias=False)
        self.experts, self.shared_expert = experts, shared_expert
        facts = {"num_experts": experts.num_experts, "top_k": top_k, "num_groups": 1}
        self._score = ctx.op("select_experts", scores=scores.scores, **facts).function
        self._select = ctx.op("select_experts", scores=best.scores, **facts).function
        self._scores, self._best, self._top_k = scores.arguments(), best.arguments(), top_k
        self._tp = ctx.tp
        leave_sums_to_caller(shared_expert)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        logits = self.router(x)
        # The experts by their logits: sigmoids of large logits are all 1. Their scores are in the same order.
        ones, ids = self._select(logits, None, *self._best)
        scores = self._score(logits, None, *self._scores)[0].to(x.dtype)
        if self._top_k == 1:  # softmax over one logit is 1
            routed = self.experts(x * scores, ones, ids)
        else:
            rows = (x.unsqueeze(1) * scores.unsqueeze(2)).flatten(0, 1)
            each = self.experts(rows, torch.ones_like(ones).view(-1, 1), ids.view(-1, 1)).float()
            routed = functools.reduce(torch.add, each.unflatten(0, (-1, self._top_k)).unbind(1)).to(x.dtype)
        return self._tp.all_reduce(routed + self.shared_expert(x))
