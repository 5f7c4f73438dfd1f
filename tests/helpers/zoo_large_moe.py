"""Checkpoints of the newer mixture-of-experts families, for `model_zoo.ZOO`.

Every run tests the first of each family, exhaustive runs all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Cohere2MoeConfig,
    DeepseekV32Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    MiniMaxM2Config,
    PreTrainedConfig,
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
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_routed_experts": 6}
_LATENT = {
    **_SIZES,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 1000.0}

Config = Callable[[], PreTrainedConfig]


def _maker(kind: type[PreTrainedConfig], sizes: dict[str, Any]) -> Callable[..., Config]:
    return lambda **settings: lambda: kind(**{**sizes, **settings})


_glm4 = _maker(Glm4MoeConfig, {**_SIZES, **_EXPERTS, "head_dim": 16})
_glm4_lite = _maker(Glm4MoeLiteConfig, _LATENT)
_minimax = _maker(MiniMaxM2Config, {**_SIZES, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2})
_ernie = _maker(Ernie4_5_MoeConfig, {**_SIZES, "moe_intermediate_size": 40, "moe_num_experts": 6, "moe_k": 2})
_hunyuan = _maker(HunYuanMoEV1Config, {**_SIZES, "num_experts": 6, "moe_topk": 2, "head_dim": 16})
_llama4 = _maker(
    Llama4TextConfig,
    {
        **_SIZES,
        "intermediate_size_mlp": 56,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "head_dim": 16,
        "attention_chunk_size": 32,
        "floor_scale": 16,
        "attn_scale": 0.5,
    },
)
_exaone = _maker(
    ExaoneMoeConfig,
    {
        **_SIZES,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
    },
)
_cohere2 = _maker(
    Cohere2MoeConfig,
    {
        **_SIZES,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "num_experts": 6,
        "sliding_window": 9,
        "logit_scale": 0.5,
        "prefix_dense_intermediate_size": 56,
    },
)
_deepseek32 = _maker(
    DeepseekV32Config,
    {**_LATENT, **_GROUPED, "first_k_dense_replace": 1, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 256},
)


def with_old_keys(config: dict[str, Any]) -> None:
    """Rewrites transformers' config keys in the form of the checkpoints on the hub."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind, partial = rope.pop("rope_type"), rope.pop("partial_rotary_factor", None)
    if partial is not None:
        config["partial_rotary_factor"] = partial
    if kind != "default":
        config["rope_scaling"] = {"type": kind, **rope}
    if config["model_type"] == "minimax_m2" and partial is not None:
        config["rotary_dim"] = int(config.pop("partial_rotary_factor") * config["head_dim"])


LARGE_MOE: dict[str, dict[str, Any]] = {
    "glm4moe": {"config": _glm4(use_qk_norm=True), "edit_config": with_old_keys},
    "glm4moe-groups": {
        "config": _glm4(
            **_GROUPED,
            attention_bias=True,
            routed_scaling_factor=1.7,
            n_shared_experts=2,
            rope_parameters={**_PARTIAL, "partial_rotary_factor": 0.25},
        ),
        "exhaustive": True,
    },
    "glm4moe-dense": {
        "config": _glm4(num_hidden_layers=3, first_k_dense_replace=2, norm_topk_prob=False, num_key_value_heads=4),
        "exhaustive": True,
    },
    "glm4moelite": {"config": _glm4_lite(), "edit_config": with_old_keys},
    "glm4moelite-groups": {
        "config": _glm4_lite(**_GROUPED, rope_parameters=_YARN, mlp_layer_types=["sparse", "dense"]),
        "exhaustive": True,
    },
    "glm4moelite-direct": {
        "config": _glm4_lite(q_lora_rank=None, attention_bias=True, rope_interleave=False, n_shared_experts=2),
        "exhaustive": True,
    },
    "minimaxm2": {
        "config": _minimax(rope_parameters={**_PARTIAL, "partial_rotary_factor": 0.5}),
        "edit_config": with_old_keys,
    },
    "minimaxm2-mha": {"config": _minimax(num_key_value_heads=4, num_experts_per_tok=3), "exhaustive": True},
    "minimaxm2-mqa": {
        "config": _minimax(
            num_key_value_heads=1, rope_parameters={**_PARTIAL, "partial_rotary_factor": 0.25}, tie_word_embeddings=True
        ),
        "exhaustive": True,
    },
    "ernie45moe": {"config": _ernie(num_hidden_layers=3), "edit_config": with_old_keys},
    "ernie45moe-steps": {
        "config": _ernie(
            num_hidden_layers=4, moe_layer_start_index=0, moe_layer_interval=2, tie_word_embeddings=False, moe_k=3
        ),
        "exhaustive": True,
    },
    "ernie45moe-unshared": {
        "config": _ernie(moe_num_shared_experts=0, moe_layer_end_index=0, moe_layer_start_index=0, head_dim=24),
        "exhaustive": True,
    },
    "hunyuanmoe": {"config": _hunyuan()},
    "hunyuanmoe-alpha": {
        "config": _hunyuan(
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "alpha": 50.0, "factor": 1.0},
            moe_topk=[2, 3],
            num_key_value_heads=4,
        ),
        "exhaustive": True,
    },
    "hunyuanmoe-biases": {
        "config": _hunyuan(attention_bias=True, tie_word_embeddings=True, head_dim=24),
        "exhaustive": True,
    },
    "llama4": {"config": _llama4(), "edit_config": with_old_keys},
    "llama4-interleaved": {
        "config": _llama4(
            interleave_moe_layer_step=2,
            use_qk_norm=False,
            no_rope_layer_interval=2,
            attention_chunk_size=48,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        "exhaustive": True,
    },
    "llama4-two": {
        "config": _llama4(num_experts_per_tok=2, attn_temperature_tuning=False, attention_chunk_size=16),
        "exhaustive": True,
    },
    "exaonemoe": {"config": _exaone()},
    "exaonemoe-groups": {
        "config": _exaone(
            num_experts=8,
            n_group=4,
            topk_group=2,
            num_shared_experts=2,
            mlp_layer_types=["sparse", "dense", "sparse"],
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        "exhaustive": True,
    },
    "exaonemoe-full": {"config": _exaone(layer_types=["full_attention"] * 3), "exhaustive": True},
    "cohere2moe": {"config": _cohere2(num_shared_experts=2, mlp_layer_types=["dense", "sparse", "sparse"])},
    "cohere2moe-sigmoid": {
        "config": _cohere2(
            expert_selection_fn="sigmoid",
            num_shared_experts=1,
            shared_expert_combination_strategy="sum",
            rms_norm_eps=1e-5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "exhaustive": True,
    },
    "cohere2moe-plain": {
        "config": _cohere2(
            expert_selection_fn="sigmoid",
            norm_topk_prob=False,
            mlp_layer_types=["dense", "dense", "sparse"],
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            prefix_dense_sliding_window_pattern=2,
            tie_word_embeddings=False,
        ),
        "exhaustive": True,
    },
    "deepseek32": {"config": _deepseek32(), "edit_config": with_old_keys},
    "deepseek32-yarn": {
        "config": _deepseek32(rope_parameters=_YARN, n_shared_experts=2, norm_topk_prob=False),
        "exhaustive": True,
    },
    "deepseek32-dense": {
        "config": _deepseek32(
            num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "dense"], n_group=1, topk_group=1
        ),
        "exhaustive": True,
    },
}
"""Settings of ZooEntry by name."""
