"""Selection of a token's experts in one launch."""

from __future__ import annotations

import torch

from mvllm_triton.kernels import routing as kernels
from mvllm_triton.tiles import power_of_two

_SCORES = {
    "softmax": kernels.SOFTMAX,
    "sigmoid": kernels.SIGMOID,
    "softmax_of_chosen": kernels.SOFTMAX_OF_CHOSEN,
}
MOST_EXPERTS = 4096
MOST_CHOSEN = 32
"""The loop over a token's experts is unrolled."""
MOST_GROUPS = 32


def refusals(num_experts: int, top_k: int, num_groups: int) -> list[str]:
    """Reasons why the kernel does not select; empty if it does."""
    limits = (("experts", num_experts, MOST_EXPERTS), ("chosen experts", top_k, MOST_CHOSEN))
    return [
        f"the kernel selects among at most {most} {name}, not {number}"
        for name, number, most in (*limits, ("groups", num_groups, MOST_GROUPS))
        if number > most
    ]


def select_experts(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    scores: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_by: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of each token's experts, as core's operation of this name. Ties go to the first experts."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    if num_tokens == 0:
        return weights, ids
    of_chosen = scores == "softmax_of_chosen"
    added = None if of_chosen or correction is None else correction.contiguous()
    experts_pad = power_of_two(num_experts)
    kernels.fused_topk[(num_tokens,)](
        weights, ids, logits, weights if added is None else added, logits.stride(0), scale,
        NUM_EXPERTS=num_experts,
        EXPERTS_PAD=experts_pad,
        TOP_K=top_k,
        CHOSEN_PAD=power_of_two(top_k),
        SCORES=_SCORES[scores].value,
        CORRECTED=added is not None,
        NORMALIZE=normalize and not of_chosen,
        NUM_GROUPS=1 if of_chosen else num_groups,
        GROUPS_PAD=power_of_two(num_groups),
        TOP_GROUPS=1 if of_chosen else top_groups,
        BEST_OF_GROUP=1 if group_by == "best" else 2,
        num_warps=max(1, min(8, experts_pad // 256)),
    )  # fmt: skip
    return weights, ids
