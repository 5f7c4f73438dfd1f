"""Mistral 4: the record. Checkpoints with images are those of Mistral 3 with this language model."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType
from mvllm.config.rope_parameters import YARN_DEFAULTS

FAMILY = ModelFamily(
    architectures={"Mistral4ForCausalLM": Architecture("mvllm.families.mistral4.model:Mistral4ForCausalLM")},
    model_types={
        "mistral4": ModelType(
            "Mistral4ForCausalLM",
            never_sliding=True,
            rope_defaults={
                **YARN_DEFAULTS,
                "rope_theta": 10_000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
            },
            key_aliases={"num_local_experts": "n_routed_experts"},
        )
    },
)
