"""DeepSeek V2, V3 and V3.2: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType, MTPHeads

_FOLDER = "mvllm.families.deepseek"
_MTP = {"DeepseekV3ForCausalLM": "DeepseekV3MTP", "DeepseekV32ForCausalLM": "DeepseekV32MTP"}

FAMILY = ModelFamily(
    architectures={
        "DeepseekV2ForCausalLM": Architecture(f"{_FOLDER}.model:DeepseekV2ForCausalLM"),
        **{
            name: Architecture(
                f"{_FOLDER}.model:{name}", mtp=MTPHeads(f"{_FOLDER}.mtp:{head}", "model.layers.{layer}.")
            )
            for name, head in _MTP.items()
        },
    },
    model_types={
        "deepseek_v2": ModelType("DeepseekV2ForCausalLM", never_sliding=True),
        "deepseek_v3": ModelType("DeepseekV3ForCausalLM", never_sliding=True),
        "deepseek_v32": ModelType(
            "DeepseekV32ForCausalLM",
            never_sliding=True,
            key_aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
        ),
    },
)
