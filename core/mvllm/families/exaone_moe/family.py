"""EXAONE MoE: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType

_MODEL = Architecture("mvllm.families.exaone_moe.model:ExaoneMoeForCausalLM")

FAMILY = ModelFamily(
    architectures={"ExaoneMoeForCausalLM": _MODEL, "ExaoneMoEForCausalLM": _MODEL},
    model_types={"exaone_moe": ModelType("ExaoneMoeForCausalLM", sliding_window=4096)},
)
