"""Checkpoints of families with delta rules or short convolutions beside attention, for `model_zoo.ZOO`.

Every run tests one of each family; exhaustive runs test all. `as_published` writes a config with the keys of the hub,
so that transformers and the engine both read the old keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

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
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 24}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_QWEN = {**_SIZES, **_DELTA, "head_dim": 32}
_EQUAL_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
_THETA = {"rope_type": "default", "rope_theta": 1000.0}
_MIXED = {"layer_types": ["conv", "full_attention", "conv"]}
_LFM2 = {**_SIZES, **_MIXED, "block_multiple_of": 8}
_KIMI = {
    **_SIZES,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
_LONG_RUN = {"exhaustive": True}

Tensors = dict[str, torch.Tensor]


def _of(config: Callable[..., PreTrainedConfig], sizes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"config": lambda: config(**{**sizes, **settings})}


def as_published(config: dict[str, Any]) -> None:
    """Rewrites transformers' config keys in the form of the checkpoints on the hub."""
    match config["model_type"]:
        case "qwen3_next":
            rope = config.pop("rope_parameters")
            config["rope_theta"], config["partial_rotary_factor"] = rope["rope_theta"], rope["partial_rotary_factor"]
            config["rope_scaling"] = None
        case "lfm2" | "lfm2_moe":
            config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
            if config["model_type"] == "lfm2":
                types = config.pop("layer_types")
                config["full_attn_idxs"] = [i for i, kind in enumerate(types) if kind == "full_attention"]
                config["block_ff_dim"] = config["intermediate_size"]
            config["tie_embedding"] = config.pop("tie_word_embeddings")
        case "kimi_linear":
            types, dense = config.pop("layer_types"), config.pop("mlp_layer_types")
            numbers: dict[str, list[int]] = {"full_attention": [], "linear_attention": []}
            for number, kind in enumerate(types, start=1):
                numbers[kind].append(number)
            config["linear_attn_config"] = {
                "full_attn_layers": numbers["full_attention"],
                "kda_layers": numbers["linear_attention"],
                "head_dim": config.pop("linear_head_dim"),
                "num_heads": config.pop("linear_num_heads"),
                "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
            }
            config |= {"first_k_dense_replace": dense.count("dense"), "moe_layer_freq": 1, "mla_use_nope": True}
        case "olmo_hybrid":
            config["rope_parameters"]["rope_theta"] = None
        case other:
            raise ValueError(other)


def below_language_model(tensors: Tensors) -> Tensors:
    """Names of a checkpoint for text and images, with tensors of the other parts."""
    renamed = {re.sub(r"^model\.(language_model\.)?", "model.language_model.", name): t for name, t in tensors.items()}
    others = ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.gate_proj.weight", "mtp.fc.weight")
    return {**renamed, **{name: torch.zeros(4, 4) for name in others}}


def with_stacked_experts(tensors: Tensors) -> Tensors:
    """As published: a tensor for the gates and ups of all experts of a layer, and one for the downs."""
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted(name for name in tensors if ".experts." in name and name.endswith("gate_proj.weight")):
        module, gate, kinds = name.rsplit(".", 3)[0], tensors.pop(name), ("up", "down")
        up, down = (tensors.pop(name.replace("gate_proj", f"{kind}_proj")) for kind in kinds)
        stacked.setdefault(f"{module}.gate_up_proj", []).append(torch.cat((gate, up)))
        stacked.setdefault(f"{module}.down_proj", []).append(down)
    return below_language_model({**tensors, **{name: torch.stack(parts) for name, parts in stacked.items()}})


def as_composite(config: dict[str, Any]) -> None:
    """The config of a checkpoint for text and images."""
    text, model_type = dict(config), config["model_type"]
    (architecture,) = text.pop("architectures")
    tied = text["tie_word_embeddings"]
    config.clear()
    config |= {
        "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": model_type.removesuffix("_text"),
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 64},
        "tie_word_embeddings": tied,
    }


def with_filters_of(sizes: tuple[int, int, int]) -> Callable[[Tensors], Tensors]:
    """Divides the filters of q, k and v as published checkpoints do; transformers writes equal parts."""

    def edit(tensors: Tensors) -> Tensors:
        names = [name for name in tensors if "q_conv1d" in name]
        for name in names:
            parts = [name.replace("q_conv1d", f"{letter}_conv1d") for letter in "qkv"]
            filters = torch.cat([tensors[part] for part in parts]).split(sizes)
            tensors |= {part: rows.contiguous() for part, rows in zip(parts, filters, strict=True)}
        return tensors

    return edit


DELTA: dict[str, dict[str, Any]] = {
    "qwen3next": {**_of(Qwen3NextConfig, _QWEN, **_SHARED), "edit_config": as_published},
    "qwen3next-dense-layer-tied": {
        **_of(
            Qwen3NextConfig,
            {**_QWEN, **_SHARED, **_EQUAL_HEADS},
            mlp_only_layers=[1],
            attention_bias=True,
            tie_word_embeddings=True,
            num_key_value_heads=4,
            rope_parameters={**_THETA, "partial_rotary_factor": 0.5},
        ),
        **_LONG_RUN,
    },
    "qwen3next-default-kinds": {
        **_of(Qwen3NextConfig, {**_QWEN, **_SHARED}, layer_types=None, num_hidden_layers=4, norm_topk_prob=False),
        **_LONG_RUN,
    },
    "qwen35": {
        **_of(Qwen3_5TextConfig, _QWEN, rope_parameters=_MROPE),
        "edit_config": as_composite,
        "edit_tensors": below_language_model,
    },
    "qwen35-text-tied": {
        **_of(Qwen3_5TextConfig, {**_QWEN, **_EQUAL_HEADS}, tie_word_embeddings=True, num_key_value_heads=1),
        **_LONG_RUN,
    },
    "qwen35-default-kinds": {
        # With a smaller epsilon, transformers' own float32 is up to 8.5e-4 away from its float64.
        **_of(Qwen3_5TextConfig, _QWEN, layer_types=None, num_hidden_layers=4, attention_bias=True, rms_norm_eps=1e-5),
        **_LONG_RUN,
    },
    "qwen35moe": {
        **_of(Qwen3_5MoeTextConfig, {**_QWEN, **_SHARED}, rope_parameters=_MROPE),
        "edit_config": as_composite,
        "edit_tensors": with_stacked_experts,
    },
    "qwen35moe-text": {**_of(Qwen3_5MoeTextConfig, {**_QWEN, **_SHARED, **_EQUAL_HEADS}), **_LONG_RUN},
    "qwen35moe-tied": {
        **_of(Qwen3_5MoeTextConfig, {**_QWEN, **_SHARED}, tie_word_embeddings=True, num_key_value_heads=4),
        **_LONG_RUN,
    },
    "lfm2": {**_of(Lfm2Config, _LFM2), "edit_config": as_published},
    "lfm2-biases-untied": {
        **_of(
            Lfm2Config,
            _LFM2,
            conv_bias=True,
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
            num_key_value_heads=1,
        ),
        **_LONG_RUN,
    },
    "lfm2-multiplier": {
        **_of(Lfm2Config, _LFM2, block_ffn_dim_multiplier=1.3, rope_parameters=_THETA, num_key_value_heads=4),
        **_LONG_RUN,
    },
    "lfm2moe": {
        **_of(Lfm2MoeConfig, {**_SIZES, **_MIXED, **_EXPERTS}, num_dense_layers=1),
        "edit_config": as_published,
    },
    "lfm2moe-no-bias": {
        **_of(
            Lfm2MoeConfig,
            {**_SIZES, **_MIXED, **_EXPERTS},
            num_dense_layers=1,
            use_expert_bias=False,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            tie_word_embeddings=False,
        ),
        **_LONG_RUN,
    },
    "lfm2moe-biases": {
        **_of(Lfm2MoeConfig, {**_SIZES, **_MIXED, **_EXPERTS}, num_dense_layers=2, conv_bias=True, conv_L_cache=4),
        **_LONG_RUN,
    },
    "kimilinear": {**_of(KimiLinearConfig, _KIMI), "edit_config": as_published},
    "kimilinear-query-latent": {
        **_of(KimiLinearConfig, _KIMI, q_lora_rank=24, linear_conv_kernel_dim=3, n_shared_experts=2),
        **_LONG_RUN,
    },
    "kimilinear-groups": {
        **_of(KimiLinearConfig, _KIMI, n_group=3, topk_group=2, norm_topk_prob=False, linear_head_dim=24),
        "edit_config": as_published,
        **_LONG_RUN,
    },
    "olmohybrid": {
        **_of(OlmoHybridConfig, {**_SIZES, **_DELTA}, num_key_value_heads=4),
        "edit_config": as_published,
        "edit_tensors": with_filters_of((32, 32, 48)),
    },
    "olmohybrid-rope": {
        **_of(OlmoHybridConfig, {**_SIZES, **_DELTA}, rope_parameters=_THETA, linear_allow_neg_eigval=False),
        "edit_tensors": with_filters_of((32, 32, 48)),
        **_LONG_RUN,
    },
    "olmohybrid-default-sizes": {
        **_of(OlmoHybridConfig, _SIZES, num_hidden_layers=4, tie_word_embeddings=True, attention_bias=True),
        "edit_tensors": with_filters_of((48, 48, 96)),
        **_LONG_RUN,
    },
}
"""Settings of ZooEntry by name."""
