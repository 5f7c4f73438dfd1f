"""Classifier-free guidance in the worker: `u + s (c - u)`, of the logits behind both prompts.

Source: Ho and Salimans, "Classifier-Free Diffusion Guidance" (2022); for language models Sanchez et al., "Stay on topic
with Classifier-Free Guidance" (2023), whose log-probabilities differ from logits by a constant in each row.
"""

from __future__ import annotations

import torch

from mvllm.extension_api import LogitsCombiner
from mvllm_image_generation.guidance import decode


class GuidanceCombiner(LogitsCombiner):
    """The combiner `guidance`. The primary's logits c are conditional, those of the companion u unconditional."""

    def weight(self, settings: bytes) -> float:
        return decode(settings).scale

    def combine(self, primary: torch.Tensor, companion: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return companion + weights * (primary - companion)
