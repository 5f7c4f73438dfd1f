"""EXAONE MoE: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType, MTPHeads

_FOLDER = "mvllm.families.exaone_moe"
_MODEL = Architecture(f"{_FOLDER}.model:ExaoneMoeForCausalLM", mtp=MTPHeads(f"{_FOLDER}.mtp:ExaoneMoeMTP", "mtp."))

FAMILY = ModelFamily(
    architectures={"ExaoneMoeForCausalLM": _MODEL, "ExaoneMoEForCausalLM": _MODEL},
    model_types={"exaone_moe": ModelType("ExaoneMoeForCausalLM", sliding_window=4096)},
)
