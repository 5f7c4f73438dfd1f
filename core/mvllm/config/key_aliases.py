"""Second names of keys of `config.json`, which transformers accepts for some families."""

from __future__ import annotations

from typing import Any

_EXPERTS = {"num_local_experts": "n_routed_experts"}
_BOTH = {**_EXPERTS, "num_experts": "n_routed_experts"}
_ALIASES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("mistral4", "glm4_moe_lite", "nemotron_h"), _EXPERTS),
    "glm4_moe": {**_EXPERTS, "num_mtp_layers": "num_nextn_predict_layers"},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _BOTH),
    "glm4v_moe_text": _EXPERTS,
    "minimax_m2": {"num_experts": "num_local_experts"},
    "hunyuan_v1_moe": {"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    "granitemoehybrid": {"layers_block_type": "layer_types"},
}
"""By model type: the second name and the name that model classes read."""

_DECODER_KEYS: dict[str, dict[str, str]] = {
    "whisper": {
        "d_model": "hidden_size",
        "decoder_layers": "num_hidden_layers",
        "decoder_attention_heads": "num_attention_heads",
        "max_target_positions": "max_position_embeddings",
    },
}
"""By model type of encoder-decoder models: keys of the decoder, and the names that model classes read. Those names may
be there with values of the encoder."""


def with_read_names(values: dict[str, Any]) -> dict[str, Any]:
    """The values of `config.json` with those of second names also under the names that model classes read.

    A value under the latter takes precedence, except in encoder-decoder models.
    """
    family = str(values.get("model_type"))
    added = {ours: values[theirs] for theirs, ours in _ALIASES.get(family, {}).items() if theirs in values}
    decoder = {ours: values[theirs] for theirs, ours in _DECODER_KEYS.get(family, {}).items() if theirs in values}
    if decoder:
        decoder["num_key_value_heads"] = decoder.get("num_attention_heads")
    return {**added, **values, **decoder}
