"""Checkpoints of further dense families, for `model_zoo.ZOO`.

Every run tests one or two of each family; exhaustive runs test all. `as_published` writes a config with the keys of the
hub, so that transformers and the engine both read the old keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Starcoder2Config,
)

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_FALCON = {key: value for key, value in _SIZES.items() if key not in ("intermediate_size", "num_key_value_heads")}
_THETA = {"rope_type": "default", "rope_theta": 1000.0}
_PHI_ORIGINAL = 200
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.05 * i for i in range(6)],
    "long_factor": [1.5 + 0.5 * i for i in range(6)],
}


def _of(config: Callable[..., PreTrainedConfig], *sizes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for some in (*sizes, settings):
        merged |= some
    return {"config": lambda: config(**merged)}


def as_published(config: dict[str, Any]) -> None:
    """Rewrites transformers' config keys in the form of the checkpoints on the hub."""
    rope = config.pop("rope_parameters")
    match config["model_type"]:
        case "gemma2":
            config["rope_theta"] = rope["rope_theta"]
            del config["layer_types"], config["tie_word_embeddings"]
        case "gemma3_text":
            full, local = rope["full_attention"], rope["sliding_attention"]
            config["rope_theta"], config["rope_local_base_freq"] = full.pop("rope_theta"), local["rope_theta"]
            config["rope_scaling"] = None if full["rope_type"] == "default" else full
            config["sliding_window_pattern"] = 1 + config.pop("layer_types").index("full_attention")
            del config["tie_word_embeddings"]
        case "phi3":
            config["rope_theta"], config["partial_rotary_factor"] = rope.pop("rope_theta"), 0.75
            rope.pop("partial_rotary_factor")
            rope.pop("original_max_position_embeddings", None)
            config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
        case "glm" | "glm4":
            config["rope_theta"], config["partial_rotary_factor"] = rope["rope_theta"], 0.5
        case "falcon":
            config["rope_theta"] = rope["rope_theta"]
            for key in ("num_kv_heads", "max_position_embeddings", "ffn_hidden_size", "num_ln_in_parallel_attn"):
                config.pop(key, None)
        case _:
            config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], None


_PUBLISHED = {"edit_config": as_published}
_LONG_RUN = {"exhaustive": True}
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 9}
_GRANITE = {"embedding_multiplier": 2.5, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 0.6}

DENSE: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_of(Gemma2Config, _SIZES, _GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=8.0),
        **_PUBLISHED,
    },
    "gemma2-layer-types": _of(
        Gemma2Config,
        _SIZES,
        _GEMMA,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_parameters=_THETA,
    ),
    "gemma2-mqa": {
        **_of(Gemma2Config, _SIZES, _GEMMA, num_key_value_heads=1, head_dim=16, sliding_window=4, rms_norm_eps=1e-3),
        **_LONG_RUN,
    },
    "gemma3": {
        **_of(
            Gemma3TextConfig,
            _SIZES,
            _GEMMA,
            num_hidden_layers=3,
            sliding_window_pattern=2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
        **_PUBLISHED,
    },
    "gemma3-capped-mqa": _of(
        Gemma3TextConfig,
        _SIZES,
        _GEMMA,
        num_key_value_heads=1,
        layer_types=["full_attention", "sliding_attention"],
        final_logit_softcapping=8.0,
        tie_word_embeddings=False,
    ),
    "gemma3-all-local": {**_of(Gemma3TextConfig, _SIZES, _GEMMA, attention_bias=True), **_LONG_RUN},
    "phi3": _of(Phi3Config, _SIZES, rope_parameters={**_THETA, "partial_rotary_factor": 0.5}, num_key_value_heads=4),
    "phi3-longrope-window": {
        **_of(
            Phi3Config,
            _SIZES,
            sliding_window=40,
            tie_word_embeddings=True,
            original_max_position_embeddings=_PHI_ORIGINAL,
            rope_parameters=_LONGROPE,
        ),
        "max_prompt_len": _PHI_ORIGINAL,
        **_PUBLISHED,
    },
    "phi3-mqa": {**_of(Phi3Config, _SIZES, num_key_value_heads=1, sliding_window=7), **_LONG_RUN},
    "granite": {**_of(GraniteConfig, _SIZES, _GRANITE), **_PUBLISHED},
    "granite-biases-tied": {
        **_of(GraniteConfig, _SIZES, _GRANITE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        **_LONG_RUN,
    },
    "olmo2": {**_of(Olmo2Config, _SIZES), **_PUBLISHED},
    "olmo2-mqa-biases": {**_of(Olmo2Config, _SIZES, num_key_value_heads=1, attention_bias=True), **_LONG_RUN},
    "olmo2-mha-tied": {
        **_of(Olmo2Config, _SIZES, num_key_value_heads=4, tie_word_embeddings=True, rms_norm_eps=1e-3),
        **_LONG_RUN,
    },
    "glm": {**_of(GlmConfig, _SIZES, head_dim=16), **_PUBLISHED},
    "glm-tied": {
        **_of(
            GlmConfig,
            _SIZES,
            head_dim=24,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters={**_THETA, "partial_rotary_factor": 0.25},
        ),
        **_LONG_RUN,
    },
    "glm4": _of(Glm4Config, _SIZES, head_dim=16, attention_bias=False),
    "glm4-biases": {**_of(Glm4Config, _SIZES, head_dim=24, num_key_value_heads=1), **_PUBLISHED, **_LONG_RUN},
    "starcoder2": {**_of(Starcoder2Config, _SIZES, sliding_window=9), **_PUBLISHED},
    "starcoder2-no-bias": {
        **_of(Starcoder2Config, _SIZES, use_bias=False, tie_word_embeddings=False, hidden_act="relu"),
        **_LONG_RUN,
    },
    "falcon": {**_of(FalconConfig, _FALCON), **_PUBLISHED},
    "falcon-new": _of(FalconConfig, _FALCON, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=80),
    "falcon-sequential": _of(FalconConfig, _FALCON, multi_query=False, parallel_attn=False, bias=True),
    "falcon-new-one-norm": {
        **_of(
            FalconConfig,
            _FALCON,
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            bias=True,
            tie_word_embeddings=False,
        ),
        **_LONG_RUN,
    },
    "falcon-mha": {**_of(FalconConfig, _FALCON, multi_query=False, rope_parameters=_THETA), **_LONG_RUN},
}
"""Settings of ZooEntry by name."""
