"""Checkpoints of the dense families of 2025 and 2026, and of Mistral 4, for `model_zoo.ZOO`.

Exhaustive runs test all of them with the whole suite. Every run tests `QUICK`, one of each family, with one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Cohere2Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma4TextConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    Ministral3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    Olmo3Config,
    PreTrainedConfig,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers.models.auto import AutoModelForCausalLM

# This version of transformers does not list it.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_FOUR = {"num_hidden_layers": 4}
_MIXED = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
_GROWING_QUERIES = {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {**_YARN, "factor": 16.0, **_GROWING_QUERIES, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_GRANITE_MOE = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}


def _of(config: Callable[..., PreTrainedConfig], *sizes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    merged: dict[str, Any] = dict(_SIZES)
    for some in (*sizes, settings):
        merged |= some
    return {"config": lambda: config(**merged), "exhaustive": True}


def as_published(config: dict[str, Any]) -> None:
    """Rewrites transformers' config keys in the form of the checkpoints on the hub."""
    rope = config.pop("rope_parameters")
    match config["model_type"]:
        case "olmo3":
            full = rope["full_attention"]
            config["rope_theta"] = full.pop("rope_theta")
            config["rope_scaling"] = full
            del config["layer_types"]
        case "smollm3":
            config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], None
            del config["layer_types"], config["tie_word_embeddings"]
        case "cohere2":
            config["rope_theta"], config["sliding_window_pattern"] = rope["rope_theta"], 4
            del config["layer_types"], config["tie_word_embeddings"]
        case "ministral3" | "mistral4":
            config["rope_parameters"] = {**rope, "type": rope["rope_type"]}
        case "hunyuan_v1_dense":
            config["rope_theta"] = rope.pop("rope_theta")
            config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
        case "gemma4_text":
            config["rope_parameters"] = rope
            config["head_dim"] = 16
            config["num_key_value_heads"] = 2
            config["global_head_dim"] = config.pop("per_layer_config")["1"]["head_dim"]
        case _:
            config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], None


_PUBLISHED = {"edit_config": as_published}

RECENT: dict[str, dict[str, Any]] = {
    "smollm3": {**_of(SmolLM3Config, _FOUR, no_rope_layer_interval=2), **_PUBLISHED},
    "smollm3-window-biases": _of(
        SmolLM3Config,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=9,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "smollm3-mqa-yarn": _of(SmolLM3Config, num_key_value_heads=1, no_rope_layers=[0, 1, 1], rope_parameters=_YARN),
    "seedoss": {**_of(SeedOssConfig, head_dim=16), **_PUBLISHED},
    "seedoss-biases-tied": _of(
        SeedOssConfig, head_dim=24, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "seedoss-no-biases": _of(
        SeedOssConfig, head_dim=16, attention_bias=False, num_key_value_heads=4, rope_parameters=_YARN
    ),
    "olmo3": {
        **_of(
            Olmo3Config,
            _FOUR,
            sliding_window=9,
            rope_parameters={
                "full_attention": {**_YARN, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        ),
        **_PUBLISHED,
    },
    "olmo3-mqa-biases": _of(Olmo3Config, _MIXED, num_key_value_heads=1, attention_bias=True),
    "olmo3-mha-tied": _of(
        Olmo3Config,
        _MIXED,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        rms_norm_eps=1e-3,
        rope_parameters={"full_attention": _LLAMA3, "sliding_attention": _PLAIN},
    ),
    "exaone4": {**_of(Exaone4Config, _FOUR, sliding_window=9), **_PUBLISHED},
    "exaone4-no-window": _of(
        Exaone4Config,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
        rope_parameters=_LLAMA3,
        tie_word_embeddings=True,
    ),
    "exaone4-mqa": _of(Exaone4Config, _MIXED, num_key_value_heads=1, head_dim=24, rms_norm_eps=1e-3),
    "cohere2": {**_of(Cohere2Config, _FOUR, sliding_window=9, logit_scale=0.5), **_PUBLISHED},
    "cohere2-biases-untied": _of(
        Cohere2Config, _MIXED, attention_bias=True, tie_word_embeddings=False, logit_scale=0.7, num_key_value_heads=1
    ),
    "cohere2-all-local": _of(
        Cohere2Config,
        logit_scale=0.5,
        sliding_window=11,
        layer_types=["sliding_attention"] * 3,
        num_key_value_heads=4,
        layer_norm_eps=1e-3,
    ),
    "ministral3": {
        **_of(Ministral3Config, head_dim=16, rope_parameters={**_YARN, "factor": 16.0, **_GROWING_QUERIES}),
        **_PUBLISHED,
    },
    "ministral3-window-tied": _of(
        Ministral3Config,
        head_dim=24,
        sliding_window=11,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters={**_PLAIN, **_GROWING_QUERIES},
    ),
    "ministral3-constant-queries": _of(
        Ministral3Config, head_dim=32, num_key_value_heads=4, rope_parameters={**_YARN, "llama_4_scaling_beta": 0.0}
    ),
    "mistral4": {**_of(Mistral4Config, _LATENT), **_PUBLISHED},
    "mistral4-groups": _of(
        Mistral4Config,
        _LATENT,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        n_shared_experts=2,
        q_lora_rank=None,
        rope_interleave=False,
        first_k_dense_replace=0,
    ),
    "mistral4-dense-biases": _of(Mistral4Config, _LATENT, first_k_dense_replace=2, attention_bias=True),
    "ernie45": {**_of(Ernie4_5Config, head_dim=16), **_PUBLISHED},
    "ernie45-biases-untied": _of(
        Ernie4_5Config, head_dim=24, num_key_value_heads=1, use_bias=True, tie_word_embeddings=False
    ),
    "ernie45-mha": _of(Ernie4_5Config, head_dim=16, num_key_value_heads=4, rope_parameters=_LLAMA3),
    "hunyuan": {
        **_of(
            HunYuanDenseV1Config,
            head_dim=16,
            rope_parameters={"rope_type": "dynamic", "alpha": 20.0, "factor": 1.0, "rope_theta": 1000.0},
        ),
        **_PUBLISHED,
    },
    "hunyuan-biases-tied": _of(HunYuanDenseV1Config, head_dim=24, attention_bias=True, tie_word_embeddings=True),
    "hunyuan-mqa": _of(HunYuanDenseV1Config, head_dim=16, num_key_value_heads=1, rope_parameters=_YARN),
    "gemma4": {
        **_of(
            Gemma4TextConfig,
            _GEMMA4,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_hidden_layers=6,
            num_kv_shared_layers=3,
            hidden_size_per_layer_input=8,
            use_double_wide_mlp=True,
            final_logit_softcapping=8.0,
        ),
        **_PUBLISHED,
    },
    "gemma4-keys-are-values": _of(
        Gemma4TextConfig, _GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, tie_word_embeddings=False
    ),
    "gemma4-experts": _of(
        Gemma4TextConfig,
        _GEMMA4,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=40,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
    ),
    "granitemoe": {**_of(GraniteMoeConfig, _GRANITE_MOE), **_PUBLISHED},
    "granitemoe-shared": _of(
        GraniteMoeSharedConfig,
        _GRANITE_MOE,
        num_key_value_heads=1,
        shared_intermediate_size=56,
        tie_word_embeddings=True,
        rope_parameters=_PLAIN,
    ),
    "gemma4-biases": _of(
        Gemma4TextConfig, _GEMMA4, attention_bias=True, num_key_value_heads=1, hidden_size_per_layer_input=16
    ),
}
"""Settings of ZooEntry by name."""

QUICK = tuple(name for name in RECENT if "-" not in name)
