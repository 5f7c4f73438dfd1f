"""Nemotron-H: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType, MTPHeads

_FOLDER = "mvllm.families.nemotron_h"

FAMILY = ModelFamily(
    architectures={
        "NemotronHForCausalLM": Architecture(
            f"{_FOLDER}.model:NemotronHForCausalLM", mtp=MTPHeads(f"{_FOLDER}.mtp:NemotronHMTP", "mtp.")
        )
    },
    model_types={
        "nemotron_h": ModelType(
            "NemotronHForCausalLM",
            head_dim=128,
            never_sliding=True,
            key_aliases={"num_local_experts": "n_routed_experts"},
        )
    },
)
