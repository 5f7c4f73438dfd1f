"""Llama 4's experts: a token's router score scales the input of its expert, not the output.

    x ─ router ─> expert and score        expert(sigmoid(score) · x) + shared_expert(x)

Checkpoints of floats store the matrices of all experts in one tensor, transposed:

    gate_up_proj    [experts, hidden_size, 2 · size]    the columns of gate, then those of up
    down_proj       [experts, size, hidden_size]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.routing import Routing
from mvllm.layers.weight_target import WeightTarget


class Llama4Experts(FusedMoE):
    """The routed experts. Each row of their input is for one expert.

    Checkpoints of quantized weights and GGUF files store each expert's matrices separately, as FusedMoE expects them.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts: Number of experts.
        is_stacked: The checkpoint stores the matrices of all experts in one tensor, as above.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        is_stacked: bool,
    ) -> None:
        super().__init__(ctx, name, hidden_size, intermediate_size, num_experts=num_experts, top_k=1)
        self.name, self._intermediate_size = name, intermediate_size
        self._is_stacked = is_stacked

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        for name, target in super().weight_targets():
            if not self._is_stacked:
                yield name, target
                continue
            number, matrix, _ = name.removeprefix(f"{self.name}.").split(".")
            expert = slice(int(number), int(number) + 1)
            rows, columns = target.source
            first = self._intermediate_size if matrix == "up_proj" else 0
            stacked = "down_proj" if matrix == "down_proj" else "gate_up_proj"
            shape = (
                (self.num_experts, self._intermediate_size, self.hidden_size)
                if stacked == "down_proj"
                else (self.num_experts, self.hidden_size, 2 * self._intermediate_size)
            )
            source = (expert, columns, slice(first + rows.start, first + rows.stop))
            of_expert = None if len(target.destination) == 2 else expert
            destination = (of_expert, *target.destination[-2:])
            yield f"{self.name}.{stacked}", WeightTarget(target.parameter, shape, source, destination, transpose=True)


class Llama4MoE(nn.Module):
    """Router, routed experts and the shared expert of one layer.

    Args:
        ctx: Build context.
        router: The checkpoint module of the router, which is never quantized.
        experts: The routed experts.
        shared_expert: A module whose output for every token is added.
        top_k: Experts per token.

    Raises:
        ModelError: There are fewer experts than `top_k`.
    """

    def __init__(
        self, ctx: BuildContext, router: str, experts: Llama4Experts, shared_expert: nn.Module, top_k: int
    ) -> None:
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
        return self._tp.all_reduce(routed) + self.shared_expert(x)
