"""Kimi Linear: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType

FAMILY = ModelFamily(
    architectures={"KimiLinearForCausalLM": Architecture("mvllm.families.kimi_linear.model:KimiLinearForCausalLM")},
    model_types={"kimi_linear": ModelType("KimiLinearForCausalLM", never_sliding=True)},
)
