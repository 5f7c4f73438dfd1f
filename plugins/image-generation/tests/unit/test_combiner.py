"""Guidance in the worker: the combined logits of a request and of its unconditional prompt."""

from __future__ import annotations

import torch

from mvllm.sampling.logits_combiner import load_combiner
from mvllm_image_generation.combiner import GuidanceCombiner
from mvllm_image_generation.guidance import GuidanceSettings, encode


def test_logits_are_those_of_classifier_free_guidance() -> None:
    combiner = load_combiner("guidance")
    assert isinstance(combiner, GuidanceCombiner)
    scales = [combiner.weight(encode(GuidanceSettings(scale))) for scale in (3.0, 0.5)]
    own, other = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(0))
    combined = combiner.combine(own, other, torch.tensor(scales).unsqueeze(1))
    assert torch.equal(combined[0], other[0] + 3.0 * (own[0] - other[0]))
    assert torch.equal(combined[1], other[1] + 0.5 * (own[1] - other[1]))
