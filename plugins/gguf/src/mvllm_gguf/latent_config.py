"""The keys of config.json for families with latent attention (MLA) and experts: DeepSeek V2 and V3, Mistral 4.

Source: convert_hf_to_gguf.py and src/models of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from mvllm.extension_api import get_logger
from mvllm_gguf.decoder_config import decoder, has, num_experts, num_mtp_modules
from mvllm_gguf.metadata import Metadata
from mvllm_gguf.rope_config import rope_config

logger = get_logger("mvllm.gguf.latent_config")

_GATING_SOFTMAX, _GATING_SIGMOID = 1, 2  # numbers of llama.cpp's expert_gating_func
_EXPERT_GROUPS = {(60, 160): (8, 3), (61, 256): (8, 4)}
"""n_group and topk_group by layers and experts, for old files of DeepSeek V2 and V3, which do not store them."""
_TEMPERATURE = "attention.temperature_scale"


def deepseek2(values: Metadata) -> dict[str, Any]:
    """Files of the architecture `deepseek2`: DeepSeek V2 or V3, by the function of the router's scores.

    With a factor on queries it is Mistral 4: converters of Mistral's own checkpoint format store it so.
    """
    if not values.is_zero(_TEMPERATURE):
        return mistral4(values)
    gating = _gating(values)
    if gating not in (0, _GATING_SOFTMAX, _GATING_SIGMOID):
        raise values.error(f"has {gating} as 'deepseek2.expert_gating_func', expected softmax (1) or sigmoid (2)")
    is_v3 = gating == _GATING_SIGMOID
    config = _latent(
        values,
        "DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM",
        "deepseek_v3" if is_v3 else "deepseek_v2",
    )
    if not is_v3:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config


def mistral4(values: Metadata) -> dict[str, Any]:
    """Files of the architecture `mistral4`.

    A file without `attention.temperature_scale` has no factor on queries, as in llama.cpp, whose converter of Hugging
    Face checkpoints does not store it.
    """
    if (gating := _gating(values)) not in (0, _GATING_SOFTMAX):
        raise values.error(f"has {gating} as '{values.architecture}.expert_gating_func', expected softmax (1)")
    config = _latent(values, "Mistral4ForCausalLM", "mistral4")
    config["stacked_experts"] = False  # the file's experts are read one by one
    config["head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    scaling = config.get("rope_scaling", {})
    original = scaling.get("original_max_position_embeddings")
    if values.is_zero(_TEMPERATURE):
        logger.info(
            "%s has no '%s.%s': queries do not grow with the position, in llama.cpp neither. The checkpoint may have "
            "'llama_4_scaling_beta'; if so, outputs beyond %s tokens differ from the checkpoint's.",
            *(values.file, values.architecture, _TEMPERATURE, original or "the original context's"),
        )
        return config
    if original is None:
        raise values.error(f"has '{values.architecture}.{_TEMPERATURE}' without YaRN, expected both")
    length = values.integer("attention.temperature_length", original)
    if length != original:
        raise values.error(
            f"has {length} as '{values.architecture}.attention.temperature_length', expected the original context "
            f"length {original}"
        )
    scaling["llama_4_scaling_beta"] = values.number(_TEMPERATURE)
    return config


def _gating(values: Metadata) -> int:
    return values.integer("expert_gating_func", _GATING_SOFTMAX, at_least=0)


def _latent(values: Metadata, architecture: str, model_type: str) -> dict[str, Any]:
    # Files with split key and value projections store head sizes under separate keys.
    rope_dim = values.integer("rope.dimension_count")
    key_length = values.integer("attention.key_length_mla", values.integer("attention.key_length"))
    if key_length <= rope_dim:
        raise values.error(f"has query heads of {key_length} elements, expected more than the {rope_dim} with RoPE")
    config = decoder(
        values,
        architecture,
        model_type,
        hidden_act="silu",
        intermediate_size=values.integer("feed_forward_length"),
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        attention_bias=has(values, "attn_output.bias"),
        q_lora_rank=values.integer("attention.q_lora_rank") if "attention.q_lora_rank" in values else None,
        kv_lora_rank=values.integer("attention.kv_lora_rank"),
        qk_nope_head_dim=key_length - rope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=values.integer("attention.value_length_mla", values.integer("attention.value_length")),
        n_routed_experts=num_experts(values),
        n_shared_experts=values.integer("expert_shared_count", 0, at_least=0) or None,
        num_experts_per_tok=values.integer("expert_used_count"),
        moe_intermediate_size=values.integer("expert_feed_forward_length"),
        first_k_dense_replace=values.integer("leading_dense_block_count", 0, at_least=0),
        routed_scaling_factor=values.number("expert_weights_scale", 1.0),
        norm_topk_prob=values.boolean("expert_weights_norm", False),
        num_nextn_predict_layers=num_mtp_modules(values),
    )
    config["num_key_value_heads"] = config["num_attention_heads"]  # files store 1, for the shared latent
    known = _EXPERT_GROUPS.get((config["num_hidden_layers"], config["n_routed_experts"]), (1, 1))
    config["n_group"] = values.integer("expert_group_count", known[0])
    config["topk_group"] = values.integer("expert_group_used_count", known[1])
    config |= rope_config(values, rope_dim, config["max_position_embeddings"])
    if config.get("rope_scaling", {}).get("rope_type") == "yarn":
        config["rope_scaling"] |= _mscale(values)
    return config


def _mscale(values: Metadata) -> dict[str, float]:
    """`mscale` and `mscale_all_dim` of YaRN. Files store a tenth of `mscale_all_dim`.

    In all published models both are equal. For a checkpoint without `mscale_all_dim`, converters store zero or nothing;
    both are then left out.
    """
    key = "rope.scaling.yarn_log_multiplier"
    if values.is_zero(key):
        logger.info(
            "%s has YaRN without %r: taken as a checkpoint without 'mscale_all_dim'. Convert it again with a newer "
            "converter if the checkpoint has it.",
            values.file,
            f"{values.architecture}.{key}",
        )
        return {}
    scale = round(10 * values.number(key), 6)
    return {"mscale": scale, "mscale_all_dim": scale}
