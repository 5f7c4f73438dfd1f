"""The record of the family: which class runs it, and how its config.json is read. Imports no torch."""

from __future__ import annotations

from mvllm.extension_api.model_families import Architecture, ModelFamily, ModelType

FAMILY = ModelFamily(
    architectures={"ParallelBlockForCausalLM": Architecture("mvllm_example_model.model:ParallelBlockForCausalLM")},
    model_types={
        "parallel_block": ModelType("ParallelBlockForCausalLM", key_aliases={"inner_size": "intermediate_size"})
    },
)
