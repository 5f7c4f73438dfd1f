"""The operation `select_experts`: the experts of each token, and their weights.

logits  ──softmax or sigmoid──>  scores  ──(+ correction)──>  selection among the best groups  ──>  ids
                                   └──────────── scores of the selected, scaled ──────────────>  weights
"""

from __future__ import annotations

import torch

from mvllm.ops.schema import OpSchema

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")


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
    """Selects the experts of each token from a router's logits.

    Args:
        logits: [T, num_experts], compute dtype or float32; rows may be strided. Computed in float32.
        correction: [num_experts] or None, float32: added to the scores for the selection, not for the weights. Without
            effect for `softmax_of_chosen`.
        top_k: Experts per token.
        scores: `softmax` over all experts, `sigmoid` of each, or `softmax_of_chosen`: the experts with the largest
            logits, and softmax over these.
        normalize: Whether the weights are divided by their sum. False for `softmax_of_chosen`.
        scale: Factor on the weights, after normalisation.
        num_groups: Experts form so many equal groups, in their order. 1 for `softmax_of_chosen`.
        top_groups: A token's experts are in so many groups, those with the largest scores.
        group_by: Score of a group: that of its best expert (`best`), or the sum of its best two (`best_two`).

    Returns:
        Weights [T, top_k], float32, and expert ids [T, top_k], int64, distinct within a row, the largest score first.
        Among equal scores any may be selected, the same ones for equal rows. A NaN is larger than any number.
    """
    logits = logits.float()
    if scores == "softmax_of_chosen":
        best, ids = torch.topk(logits, top_k, dim=-1)
        return torch.softmax(best, dim=-1) * scale, ids
    values = torch.sigmoid(logits) if scores == "sigmoid" else torch.softmax(logits, dim=-1)
    by = values if correction is None else values + correction
    if top_groups < num_groups:
        by = _only_best_groups(by, num_groups, top_groups, 1 if group_by == "best" else 2)
    ids = torch.topk(by, top_k, dim=-1).indices
    weights = values.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def _only_best_groups(scores: torch.Tensor, num_groups: int, top_groups: int, count: int) -> torch.Tensor:
    """The scores, with -inf outside of the groups whose `count` best have the largest sum."""
    grouped = scores.unflatten(-1, (num_groups, -1))
    value = grouped.topk(count, dim=-1).values.sum(dim=-1)
    worst = torch.full_like(value, float("-inf"))
    kept = worst.scatter(-1, value.topk(top_groups, dim=-1).indices, 0.0)
    return (grouped + kept.unsqueeze(-1)).flatten(-2)


SELECT_EXPERTS = OpSchema(
    select_experts,
    facts={
        "num_experts": "experts of the layer",
        "top_k": "experts per token",
        "scores": "as the parameter",
        "num_groups": "groups of experts",
    },
)
