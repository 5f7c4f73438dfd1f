"""Routing: selects the experts of each token and their weights.

    logits  ──softmax or sigmoid──>  scores  ──(+ correction)──>  choice among the best groups  ──>  ids
                                       └──────────── scores of the chosen, scaled ─────────────────>  weights

Families differ in the steps, not in their order; the fields of `Routing` select the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mvllm.errors import ModelError


@dataclass(frozen=True)
class Routing:
    """Selects experts from a router's logits.

    Attributes:
        top_k: Experts per token.
        scores: `softmax` over all experts, `sigmoid` of each, or `softmax_of_chosen`: softmax over the logits of the
            selected experts only.
        normalize: Weights are normalised to a sum of one.
        scale: Factor on the weights, after normalisation.
        num_groups, top_groups: Experts form `num_groups` equal groups; a token's experts are in its best `top_groups`.
        group_by: Score of a group: its best expert (`best`), or the sum of its best two (`best_two`).
    """

    top_k: int
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_by: Literal["best", "best_two"] = "best"

    def check(self, num_experts: int) -> None:
        """Checks the settings for a model of `num_experts` experts.

        Raises:
            ModelError: The numbers of groups or of experts per token do not fit.
        """
        size = num_experts // self.num_groups
        fewest = 2 if self.group_by == "best_two" else 1
        if num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups or size < fewest:
            raise ModelError(
                f"The model's config.json is wrong: {num_experts} experts do not stand in {self.num_groups} groups of "
                f"at least {fewest}, of which {self.top_groups} are chosen."
            )
        if not 1 <= self.top_k <= self.top_groups * size:
            raise ModelError(
                f"The model's config.json is wrong: a token visits {self.top_k} experts, of {self.top_groups * size}."
            )

    def __call__(
        self, logits: torch.Tensor, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, top_k], float32, and ids [T, top_k], int64, of the experts chosen for each token.

        Args:
            logits: [T, num_experts].
            correction: [num_experts], float32: added to the scores for the selection, not for the weights.
        """
        logits = logits.float()
        if self.scores == "softmax_of_chosen":
            best, ids = torch.topk(logits, self.top_k, dim=-1)
            return torch.softmax(best, dim=-1) * self.scale, ids
        scores = torch.sigmoid(logits) if self.scores == "sigmoid" else torch.softmax(logits, dim=-1)
        by = scores if correction is None else scores + correction
        ids = torch.topk(self._of_best_groups(by), self.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scale, ids

    def _of_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, with -inf outside of the best groups."""
        if self.top_groups == self.num_groups:
            return scores
        grouped = scores.unflatten(-1, (self.num_groups, -1))
        count = 1 if self.group_by == "best" else 2
        value = grouped.topk(count, dim=-1).values.sum(dim=-1)
        worst = torch.full_like(value, float("-inf"))
        kept = worst.scatter(-1, value.topk(self.top_groups, dim=-1).indices, 0.0)
        return (grouped + kept.unsqueeze(-1)).flatten(-2)
