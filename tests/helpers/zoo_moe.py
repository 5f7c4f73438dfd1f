"""Checkpoints of mixture-of-experts families, for `model_zoo.ZOO`.

Every run tests two of each family; exhaustive runs test all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_MSCALE = {**_YARN, "mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
_GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}

Config = Callable[[], PreTrainedConfig]


def _mixtral(**settings: Any) -> Config:
    return lambda: MixtralConfig(**{**_SIZES, "num_local_experts": 4, **settings})


def _qwen2(**settings: Any) -> Config:
    return lambda: Qwen2MoeConfig(**{**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 56, **settings})


def _qwen3(**settings: Any) -> Config:
    return lambda: Qwen3MoeConfig(**{**_SIZES, **_EXPERTS, "head_dim": 16, **settings})


def _gpt_oss(**settings: Any) -> Config:
    sizes = {"intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
    return lambda: GptOssConfig(**{**_SIZES, **sizes, "rope_parameters": _YARN, "sliding_window": 11, **settings})


def _deepseek_v2(**settings: Any) -> Config:
    return lambda: DeepseekV2Config(**{**_LATENT, **settings})


def _deepseek_v3(**settings: Any) -> Config:
    return lambda: DeepseekV3Config(**{**_LATENT, **_GROUPED, **settings})


def as_published(config: dict[str, Any]) -> None:
    """Rewrites transformers' config keys in the form of the checkpoints on the hub."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if rope.pop("rope_type") == "yarn":
        config["rope_scaling"] = {"type": "yarn", **rope}
    if "num_local_experts" in config and config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if config["model_type"].startswith("deepseek"):
        del config["head_dim"], config["qk_head_dim"]


SPARSE: dict[str, dict[str, Any]] = {
    "mixtral": {"config": _mixtral()},
    "mixtral-window": {"config": _mixtral(sliding_window=9, num_experts_per_tok=3, num_key_value_heads=4)},
    "mixtral-tied": {
        "config": _mixtral(tie_word_embeddings=True, head_dim=24, num_experts_per_tok=1),
        "exhaustive": True,
    },
    "qwen2moe": {"config": _qwen2(), "edit_config": as_published},
    "qwen2moe-mixed": {
        "config": _qwen2(
            num_hidden_layers=3,
            mlp_only_layers=[0],
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=9,
        )
    },
    "qwen2moe-steps": {
        "config": _qwen2(num_hidden_layers=4, decoder_sparse_step=2, qkv_bias=False),
        "exhaustive": True,
    },
    "qwen3moe": {"config": _qwen3(norm_topk_prob=True), "edit_config": as_published},
    "qwen3moe-window": {
        "config": _qwen3(use_sliding_window=True, sliding_window=9, attention_bias=True, mlp_only_layers=[1])
    },
    "qwen3moe-steps": {
        "config": _qwen3(num_hidden_layers=4, decoder_sparse_step=2, num_experts_per_tok=4),
        "exhaustive": True,
    },
    "gptoss": {"config": _gpt_oss(), "edit_config": as_published},
    "gptoss-clamped": {
        "config": _gpt_oss(
            swiglu_limit=0.5,
            swiglu_alpha=1.1,
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters={**_YARN, "truncate": False},
        )
    },
    "gptoss-plain": {
        "config": _gpt_oss(attention_bias=False, num_hidden_layers=3, num_key_value_heads=4),
        "exhaustive": True,
    },
    "deepseek2": {"config": _deepseek_v2(), "edit_config": as_published},
    "deepseek2-groups": {
        "config": _deepseek_v2(
            **_GROUPED,
            topk_method="group_limited_greedy",
            q_lora_rank=24,
            routed_scaling_factor=1.7,
            n_shared_experts=2,
            rope_parameters=_MSCALE,
        )
    },
    "deepseek2-biases": {
        "config": _deepseek_v2(attention_bias=True, mlp_bias=True, q_lora_rank=24),
        "exhaustive": True,
    },
    "deepseek3": {"config": _deepseek_v3(), "edit_config": as_published},
    "deepseek3-yarn": {
        "config": _deepseek_v3(
            q_lora_rank=24, rope_interleave=False, norm_topk_prob=False, rope_parameters=_MSCALE, topk_group=3
        ),
        "edit_config": as_published,
    },
    "deepseek3-dense": {
        "config": _deepseek_v3(first_k_dense_replace=2, num_hidden_layers=3, n_group=1, topk_group=1),
        "exhaustive": True,
    },
}
"""Settings of ZooEntry by name."""
