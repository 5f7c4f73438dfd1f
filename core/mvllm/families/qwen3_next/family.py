"""Qwen3-Next and Qwen3.5: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType, MTPHeads, pooling_architectures

_FOLDER = "mvllm.families.qwen3_next"
_NEXT = f"{_FOLDER}.qwen3_next:Qwen3NextForCausalLM"
_DENSE, _MOE = f"{_FOLDER}.qwen3_5:Qwen3_5ForCausalLM", f"{_FOLDER}.qwen3_5:Qwen3_5MoeForCausalLM"


def _mtp(name: str) -> MTPHeads:
    keys = "mtp_num_hidden_layers", "num_nextn_predict_layers"
    return MTPHeads(f"{_FOLDER}.mtp:{name}", "mtp.", keys, default_count=1)


_DENSE_MODEL, _MOE_MODEL = Architecture(_DENSE, mtp=_mtp("Qwen3_5MTP")), Architecture(_MOE, mtp=_mtp("Qwen3_5MoeMTP"))

FAMILY = ModelFamily(
    architectures={
        "Qwen3NextForCausalLM": Architecture(_NEXT, mtp=_mtp("Qwen3NextMTP")),
        **pooling_architectures("Qwen3Next", _NEXT),
        "Qwen3_5ForCausalLM": _DENSE_MODEL,
        "Qwen3_5ForConditionalGeneration": _DENSE_MODEL,
        "Qwen3_5MoeForCausalLM": _MOE_MODEL,
        "Qwen3_5MoeForConditionalGeneration": _MOE_MODEL,
    },
    model_types={
        "qwen3_next": ModelType("Qwen3NextForCausalLM", head_dim=256, never_sliding=True),
        "qwen3_5_text": ModelType("Qwen3_5ForCausalLM", head_dim=256, never_sliding=True),
        "qwen3_5_moe_text": ModelType("Qwen3_5MoeForCausalLM", head_dim=256, never_sliding=True),
    },
)
