"""DeepSeek V2, V3 and V3.2: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType

FAMILY = ModelFamily(
    architectures={
        name: Architecture(f"mvllm.families.deepseek.model:{name}")
        for name in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")
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
