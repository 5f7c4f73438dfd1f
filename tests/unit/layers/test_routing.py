"""Expert routing equals a loop over tokens in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from mvllm.errors import ModelError
from mvllm.layers.routing import Routing
from mvllm.ops.select_experts import select_experts

NUM_EXPERTS = 12


def expected_routing(logits: list[float], correction: list[float], how: Routing) -> dict[int, float]:
    """The experts of one token and their weights."""
    if how.scores == "softmax_of_chosen":
        chosen = sorted(range(NUM_EXPERTS), key=lambda e: -logits[e])[: how.top_k]
        total = sum(math.exp(logits[e]) for e in chosen)
        return {e: math.exp(logits[e]) / total * how.scale for e in chosen}
    if how.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    corrected = [score + extra for score, extra in zip(scores, correction, strict=True)]
    size = NUM_EXPERTS // how.num_groups
    groups = [range(first, first + size) for first in range(0, NUM_EXPERTS, size)]
    count = 2 if how.group_by == "best_two" else 1
    groups.sort(key=lambda group: -sum(sorted(corrected[e] for e in group)[-count:]))
    allowed = [e for group in groups[: how.top_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -corrected[e])[: how.top_k]
    total = sum(scores[e] for e in chosen) if how.normalize else 1.0
    return {e: scores[e] / total * how.scale for e in chosen}


@pytest.mark.parametrize(
    "how",
    [
        Routing(3),
        Routing(3, normalize=True, scale=2.5),
        Routing(1, "softmax_of_chosen"),
        Routing(4, "softmax_of_chosen"),
        Routing(3, num_groups=4, top_groups=2, scale=0.5),
        Routing(3, "sigmoid", normalize=True, num_groups=4, top_groups=2, group_by="best_two"),
        Routing(4, "sigmoid", num_groups=3, top_groups=1, group_by="best_two"),
        Routing(2, "sigmoid", num_groups=1, top_groups=1, group_by="best_two"),
    ],
    ids=str,
)
@pytest.mark.parametrize("corrected", [False, True])
def test_experts_and_weights_equal_those_of_the_loop(how: Routing, corrected: bool) -> None:
    how.check(NUM_EXPERTS)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, NUM_EXPERTS, generator=generator)
    correction = 0.3 * torch.randn(NUM_EXPERTS, generator=generator) if corrected else None
    weights, ids = select_experts(logits, correction, *how.arguments())
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    for t, token in enumerate(logits.tolist()):
        no_correction = how.scores == "softmax_of_chosen" or correction is None
        wanted = expected_routing(token, [0.0] * NUM_EXPERTS if no_correction else correction.tolist(), how)
        found = dict(zip(ids[t].tolist(), weights[t].tolist(), strict=True))
        assert found.keys() == wanted.keys()
        assert all(abs(found[e] - wanted[e]) < 1e-6 for e in wanted)


@pytest.mark.parametrize(
    "how",
    [
        Routing(13),
        Routing(2, num_groups=5),
        Routing(2, num_groups=4, top_groups=5),
        Routing(4, num_groups=4, top_groups=1),
        Routing(1, num_groups=12, top_groups=2, group_by="best_two"),
    ],
    ids=str,
)
def test_invalid_numbers_of_experts_and_groups_are_refused(how: Routing) -> None:
    with pytest.raises(ModelError, match=r"config\.json is wrong"):
        how.check(NUM_EXPERTS)
