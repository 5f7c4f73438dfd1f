"""Llama 4: the record. Its vision tower is not loaded."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType

FAMILY = ModelFamily(
    architectures={
        name: Architecture(f"mvllm.families.llama4.model:{name}")
        for name in ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
    },
    model_types={
        "llama4": ModelType("Llama4ForConditionalGeneration"),
        "llama4_text": ModelType("Llama4ForCausalLM", head_dim=128, never_sliding=True),
    },
)
