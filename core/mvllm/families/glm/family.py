"""GLM-4, its models with experts and GLM-4V: the record."""

from __future__ import annotations

from mvllm.config.grid_items import grid_items_reader
from mvllm.config.model_family import Architecture, ModelFamily, ModelType, MTPHeads

_FOLDER = "mvllm.families.glm"
_ITEMS = f"{_FOLDER}.items:GlmItems"
_NEXTN = "model.layers.{layer}."
_EXPERTS = {"num_local_experts": "n_routed_experts"}

_read_4v = grid_items_reader(151343, None, (8, 12, 12))
_read_4v_moe = grid_items_reader(151363, None, (8, 12, 12))

FAMILY = ModelFamily(
    architectures={
        "GlmForCausalLM": Architecture(f"{_FOLDER}.glm4:GlmForCausalLM"),
        "Glm4ForCausalLM": Architecture(f"{_FOLDER}.glm4:Glm4ForCausalLM"),
        "Glm4MoeForCausalLM": Architecture(
            f"{_FOLDER}.glm4_moe:Glm4MoeForCausalLM", mtp=MTPHeads(f"{_FOLDER}.mtp:Glm4MoeMTP", _NEXTN)
        ),
        "Glm4MoeLiteForCausalLM": Architecture(
            f"{_FOLDER}.glm4_moe:Glm4MoeLiteForCausalLM", mtp=MTPHeads(f"{_FOLDER}.mtp:Glm4MoeLiteMTP", _NEXTN)
        ),
        "GlmMoeDsaForCausalLM": Architecture(
            f"{_FOLDER}.glm_moe_dsa:GlmMoeDsaForCausalLM", mtp=MTPHeads(f"{_FOLDER}.mtp:GlmMoeDsaMTP", _NEXTN)
        ),
        "Glm4vForConditionalGeneration": Architecture(
            f"{_FOLDER}.glm4v:Glm4vForConditionalGeneration", read_items=_read_4v, items=_ITEMS
        ),
        "Glm46VForConditionalGeneration": Architecture(
            f"{_FOLDER}.glm4v:Glm4vForConditionalGeneration", read_items=_read_4v, items=_ITEMS
        ),
        "Glm4vMoeForConditionalGeneration": Architecture(
            f"{_FOLDER}.glm4v:Glm4vMoeForConditionalGeneration", read_items=_read_4v_moe, items=_ITEMS
        ),
    },
    model_types={
        "glm": ModelType("GlmForCausalLM", head_dim=128, never_sliding=True),
        "glm4": ModelType("Glm4ForCausalLM", head_dim=128, never_sliding=True),
        "glm4_moe": ModelType(
            "Glm4MoeForCausalLM",
            never_sliding=True,
            key_aliases={**_EXPERTS, "num_mtp_layers": "num_nextn_predict_layers"},
        ),
        "glm4_moe_lite": ModelType("Glm4MoeLiteForCausalLM", never_sliding=True, key_aliases=_EXPERTS),
        "glm_moe_dsa": ModelType(
            "GlmMoeDsaForCausalLM", never_sliding=True, key_aliases={**_EXPERTS, "num_experts": "n_routed_experts"}
        ),
        "glm4v": ModelType(tied_by_text=True),
        "glm4v_moe": ModelType(tied_by_text=True),
        "glm4v_text": ModelType(never_sliding=True),
        "glm4v_moe_text": ModelType(never_sliding=True, key_aliases=_EXPERTS),
    },
)
