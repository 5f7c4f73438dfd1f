"""Checkpoints of families with Mamba-2 layers beside attention, for `model_zoo.ZOO`.

Every run tests one of each family; exhaustive runs test all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import BambaConfig, FalconH1Config, GraniteMoeHybridConfig, NemotronHConfig, PreTrainedConfig

_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_GRANITE = {
    **_SIZES,
    **_MAMBA,
    **_MIXED,
    "shared_intermediate_size": 56,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.6,
}
_FALCON = {
    **_SIZES,
    **_MAMBA,
    "num_hidden_layers": 2,
    "mamba_n_heads": 6,
    "mamba_d_ssm": 96,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 1.3,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.4,
    "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    "mlp_multipliers": [0.9, 1.3],
}
_NEMOTRON = {
    **_SIZES,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    # transformers limits the time step of prompts, but not of single tokens. This limit has no effect.
    "time_step_min": 1e-30,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}

Config = Callable[[], PreTrainedConfig]


def _granite(**settings: Any) -> Config:
    return lambda: GraniteMoeHybridConfig(**{**_GRANITE, **settings})


def _falcon(**settings: Any) -> Config:
    return lambda: FalconH1Config(**{**_FALCON, **settings})


def _nemotron(*kinds: str, **settings: Any) -> Config:
    return lambda: NemotronHConfig(**{**_NEMOTRON, "layers_block_type": list(kinds), **settings})


def _bamba(**settings: Any) -> Config:
    return lambda: BambaConfig(**{**_SIZES, **_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], **settings})


def as_published(config: dict[str, Any]) -> None:
    """Rewrites transformers' config keys in the form of the checkpoints on the hub."""
    match config["model_type"]:
        case "granitemoehybrid":
            names = {"linear_attention": "mamba", "full_attention": "attention"}
            config["layer_types"] = [names[kind] for kind in config["layer_types"]]
            config["position_embedding_type"] = "nope"
        case "nemotron_h":
            characters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
            pattern = "".join(characters[kind] for kind in config.pop("layers_block_type"))
            config["hybrid_override_pattern"], config["num_hidden_layers"] = pattern, len(pattern)
            config.pop("layer_types", None)
        case "falcon_h1":
            config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]


def with_small_embeddings(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As in published tied checkpoints, where a large multiplier makes up for it: else logits reach 30, and their
    rounding, here and in transformers alike, comes near to the tolerance.
    """
    return {name: 0.15 * tensor if "embed_tokens" in name else tensor for name, tensor in tensors.items()}


HYBRID: dict[str, dict[str, Any]] = {
    "granitehybrid": {"config": _granite(), "edit_config": as_published},
    "granitehybrid-dense": {
        "config": _granite(
            num_local_experts=0,
            position_embedding_type="rope",
            mamba_n_groups=2,
            tie_word_embeddings=True,
            embedding_multiplier=20.0,
            **_ROPE,
        ),
        "edit_tensors": with_small_embeddings,
        "exhaustive": True,
    },
    "granitehybrid-biases": {
        "config": _granite(
            position_embedding_type="rope",
            mamba_n_groups=4,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            mamba_d_conv=3,
            attention_bias=True,
            num_experts_per_tok=3,
            **_ROPE,
        ),
        "exhaustive": True,
    },
    "falconh1": {"config": _falcon(**_ROPE), "edit_config": as_published},
    "falconh1-norm": {
        "config": _falcon(
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_n_groups=2,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
            **_ROPE,
        ),
        "exhaustive": True,
    },
    "falconh1-norm-first": {
        "config": _falcon(
            mamba_rms_norm=True,
            mamba_norm_before_gate=True,
            num_key_value_heads=4,
            head_dim=24,
            mamba_conv_bias=False,
            tie_word_embeddings=True,
            **_ROPE,
        ),
        "exhaustive": True,
    },
    "nemotronh": {
        "config": _nemotron("linear_attention", "mlp", "full_attention", "moe", n_group=2, topk_group=1),
        "edit_config": as_published,
    },
    "nemotronh-latent": {
        "config": _nemotron(
            "moe",
            "linear_attention",
            "full_attention",
            "linear_attention",
            moe_latent_size=24,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            num_key_value_heads=1,
        ),
        "exhaustive": True,
    },
    "nemotronh-biases": {
        "config": _nemotron(
            "linear_attention",
            "full_attention",
            "mlp",
            "moe",
            n_groups=1,
            use_bias=True,
            use_conv_bias=False,
            mlp_bias=True,
            head_dim=24,
            mlp_hidden_act="silu",
        ),
        "exhaustive": True,
    },
    "bamba": {"config": _bamba(**_ROPE), "exhaustive": True},
    "bamba-groups": {
        "config": _bamba(
            mamba_n_groups=2,
            mamba_proj_bias=True,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            **_ROPE,
        ),
        "exhaustive": True,
    },
    "bamba-attention-first": {
        "config": _bamba(
            num_hidden_layers=4,
            attn_layer_indices=[0, 2],
            num_key_value_heads=1,
            mamba_conv_bias=False,
            mamba_d_conv=3,
            rms_norm_eps=1e-6,
            **_ROPE,
        ),
        "exhaustive": True,
        "seed": 3,
    },
}
"""Settings of ZooEntry by name."""
