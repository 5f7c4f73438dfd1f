"""Routing: how a family selects the experts of each token, the settings of the operation `select_experts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mvllm.errors import ModelError


@dataclass(frozen=True)
class Routing:
    """Settings of the operation `select_experts`.

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

    def arguments(self) -> tuple[int, str, bool, float, int, int, str]:
        """The parameters of `select_experts` after the tensors."""
        groups = self.num_groups, self.top_groups, self.group_by
        return (self.top_k, self.scores, self.normalize, self.scale, *groups)
