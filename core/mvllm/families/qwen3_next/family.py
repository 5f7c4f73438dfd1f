"""Qwen3-Next and Qwen3.5: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType, pooling_architectures

_FOLDER = "mvllm.families.qwen3_next"
_NEXT = f"{_FOLDER}.qwen3_next:Qwen3NextForCausalLM"
_DENSE, _MOE = f"{_FOLDER}.qwen3_5:Qwen3_5ForCausalLM", f"{_FOLDER}.qwen3_5:Qwen3_5MoeForCausalLM"

FAMILY = ModelFamily(
    architectures={
        "Qwen3NextForCausalLM": Architecture(_NEXT),
        **pooling_architectures("Qwen3Next", _NEXT),
        "Qwen3_5ForCausalLM": Architecture(_DENSE),
        "Qwen3_5ForConditionalGeneration": Architecture(_DENSE),
        "Qwen3_5MoeForCausalLM": Architecture(_MOE),
        "Qwen3_5MoeForConditionalGeneration": Architecture(_MOE),
    },
    model_types={
        "qwen3_next": ModelType("Qwen3NextForCausalLM", head_dim=256, never_sliding=True),
        "qwen3_5_text": ModelType("Qwen3_5ForCausalLM", head_dim=256, never_sliding=True),
        "qwen3_5_moe_text": ModelType("Qwen3_5MoeForCausalLM", head_dim=256, never_sliding=True),
    },
)
