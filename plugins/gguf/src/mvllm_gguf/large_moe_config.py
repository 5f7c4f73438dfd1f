"""The keys of config.json for the newer mixture-of-experts families, beside those that all Llama-like families have.

Settings that files do not store (what layers have chunks, and how queries of global layers are scaled) are those of
llama.cpp.

Source: convert_hf_to_gguf.py and src/models of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mvllm_gguf.decoder_config import num_mtp_modules
from mvllm_gguf.metadata import Metadata

_SIGMOID = 2  # number of llama.cpp's expert_gating_func
_NUM_EXPERTS_WITHOUT_QK_NORM = 128  # Llama 4 Maverick


@dataclass(frozen=True)
class FamilyConfig:
    """What a family has beside the common keys.

    Attributes:
        architecture, model_type: As in config.json.
        settings: Further keys.
    """

    architecture: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)


def _glm4_moe(values: Metadata, num_experts: int, has_bias: bool) -> FamilyConfig:
    check_sigmoid(values)
    settings = {
        "attention_bias": has_bias,
        "use_qk_norm": values.has_tensor("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": _rotary_dim(values) / _head_dim(values),
        "n_routed_experts": num_experts,
        "n_shared_experts": values.integer("expert_shared_count", 0, at_least=0),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "first_k_dense_replace": values.integer("leading_dense_block_count", 0, at_least=0),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
        "norm_topk_prob": values.boolean("expert_weights_norm", True),
        "n_group": values.integer("expert_group_count", 1),
        "topk_group": values.integer("expert_group_used_count", 1),
        "num_nextn_predict_layers": num_mtp_modules(values),
    }
    return FamilyConfig("Glm4MoeForCausalLM", "glm4_moe", settings)


def _minimax_m2(values: Metadata, num_experts: int, has_bias: bool) -> FamilyConfig:
    check_sigmoid(values)
    settings = {
        "rotary_dim": _rotary_dim(values),
        "num_local_experts": num_experts,
        "num_experts_per_tok": values.integer("expert_used_count"),
        "intermediate_size": values.integer("expert_feed_forward_length", values.integer("feed_forward_length")),
    }
    return FamilyConfig("MiniMaxM2ForCausalLM", "minimax_m2", settings)


def _ernie4_5_moe(values: Metadata, num_experts: int, has_bias: bool) -> FamilyConfig:
    settings = {
        "use_bias": has_bias,
        "moe_num_experts": num_experts,
        "moe_k": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": values.integer("expert_shared_count", 0, at_least=0),
        "moe_layer_start_index": values.integer("leading_dense_block_count", 0, at_least=0),
        "moe_layer_interval": values.integer("interleave_moe_layer_step", 1),
    }
    return FamilyConfig("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", settings)


def _hunyuan_moe(values: Metadata, num_experts: int, has_bias: bool) -> FamilyConfig:
    settings = {
        "attention_bias": has_bias,
        "num_experts": num_experts,
        "moe_topk": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "intermediate_size": values.integer("expert_shared_feed_forward_length"),
    }
    return FamilyConfig("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", settings)


def _llama4(values: Metadata, num_experts: int, has_bias: bool) -> FamilyConfig:
    settings = {
        "attention_bias": has_bias,
        "num_local_experts": num_experts,
        "num_experts_per_tok": values.integer("expert_used_count"),
        "intermediate_size_mlp": values.integer("feed_forward_length"),
        "intermediate_size": values.integer("expert_feed_forward_length"),
        "interleave_moe_layer_step": values.integer("interleave_moe_layer_step", 1),
        "attention_chunk_size": values.integer("attention.chunk_size", 8192),
        "use_qk_norm": num_experts != _NUM_EXPERTS_WITHOUT_QK_NORM,
        "stacked_experts": False,  # the file's experts are read one by one
    }
    return FamilyConfig("Llama4ForCausalLM", "llama4_text", settings)


LARGE_MOE: dict[str, Callable[[Metadata, int, bool], FamilyConfig]] = {
    "ernie4_5-moe": _ernie4_5_moe,
    "glm4moe": _glm4_moe,
    "hunyuan-moe": _hunyuan_moe,
    "llama4": _llama4,
    "minimax-m2": _minimax_m2,
}
"""By `general.architecture`. Called with the metadata, the number of experts, and whether queries have biases."""


def _head_dim(values: Metadata) -> int:
    usual = values.integer("embedding_length") // values.integer("attention.head_count")
    return values.integer("attention.key_length", usual)


def _rotary_dim(values: Metadata) -> int:
    return values.integer("rope.dimension_count", _head_dim(values))


def check_sigmoid(values: Metadata) -> None:
    """Checks that experts have sigmoid scores, or that the file does not name the function.

    Raises:
        ModelError: They have others.
    """
    found = values.integer("expert_gating_func", _SIGMOID, at_least=0)
    if found != _SIGMOID:
        raise values.error(f"has {found} as '{values.architecture}.expert_gating_func', expected sigmoid ({_SIGMOID})")
