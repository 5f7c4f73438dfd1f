"""Writes config.json from the metadata of a GGUF file, with the keys of the family's Hugging Face checkpoints.

Settings that files do not store (activation functions, the pattern of sliding windows, the scale of attention scores)
are those of llama.cpp. Biases and tied embeddings are derived from the tensors of the file.

Sources: convert_hf_to_gguf.py and src/models of llama.cpp; the config classes of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mvllm.extension_api import ModelError
from mvllm_gguf.decoder_config import (
    attention_bias,
    decoder,
    gated,
    has,
    head_dim,
    num_experts,
    num_layers,
    rows_of,
    window_types,
)
from mvllm_gguf.gemma4_config import gemma4
from mvllm_gguf.header import GGUFModel
from mvllm_gguf.hybrid_config import HYBRID
from mvllm_gguf.large_moe_config import LARGE_MOE
from mvllm_gguf.latent_config import deepseek2, mistral4
from mvllm_gguf.metadata import Metadata
from mvllm_gguf.rope_config import rope_config

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_GATING_SOFTMAX = 1  # number of llama.cpp's expert_gating_func
_PROJECTOR = "clip"
_OF_VISION = ("qwen2vl", "qwen3vl")
"""Language parts of models whose rotary positions have three dimensions. They are equal for text."""
_OVERFLOW_IN_FLOAT16 = ("gemma2", "gemma3", "gemma4", "glm4")
_GRANITE = ("granite", "granitehybrid", "granitemoe")
_LATENT = ("deepseek2", "mistral4")
_SIGMOID_HYBRIDS = ("kimi-linear", "lfm2moe", "nemotron_h_moe")
_UNUSED_SETTINGS: tuple[tuple[str, object, tuple[str, ...]], ...] = (
    ("attention.causal", True, ()),
    ("attention.clamp_kqv", 0.0, ()),
    ("attention.max_alibi_bias", 0.0, ()),
    ("attention.scale", 0.0, _GRANITE),
    ("attention.temperature_scale", 0.0, (*_LATENT, "mistral3")),
    ("attn_logit_softcapping", 0.0, ("gemma2",)),
    ("embedding_scale", 1.0, _GRANITE),
    ("expert_gating_func", _GATING_SOFTMAX, (*_LATENT, "gpt-oss", "glm4moe", "minimax-m2", *_SIGMOID_HYBRIDS)),
    ("expert_weights_scale", 1.0, (*_LATENT, "glm4moe", "kimi-linear", "nemotron_h_moe")),
    ("final_logit_softcapping", 0.0, ("gemma2", "gemma3", "gemma4")),
    ("logit_scale", 1.0, (*_GRANITE, "cohere2")),
    ("pooling_type", 0, ()),
    ("residual_scale", 1.0, _GRANITE),
    ("rope.dimension_sections", None, ("chatglm", "glm4", "qwen35", "qwen35moe", *_OF_VISION)),
    ("rope.scaling.yarn_log_multiplier", 0.0, (*_LATENT, "mistral3")),
)
"""Keys that change results, their neutral values, and the architectures for which they are supported."""


def supported_gguf_architectures() -> tuple[str, ...]:
    """Supported values of `general.architecture`, sorted."""
    return tuple(sorted(_FAMILIES))


def model_config(model: GGUFModel) -> dict[str, Any]:
    """`config.json` of the same model's Hugging Face checkpoint.

    Args:
        model: The headers of the files.

    Returns:
        A JSON object. `dtype` is float16 or float32 if all matrices have that type, else bfloat16. It is never float16
        for families whose activations exceed its range.

    Raises:
        ModelError: The architecture is not supported, or a key or tensor is missing or has another type than expected.
    """
    values = Metadata(model)
    family = _FAMILIES.get(values.architecture)
    if values.architecture == _PROJECTOR:
        raise ModelError(
            f"{values.file}: it is the encoder of a multimodal model (mmproj), and GGUF files are read for text only. "
            "Name the file of its language model, or use a safetensors checkpoint, which has both."
        )
    if family is None:
        raise ModelError(
            f"{values.file}: the architecture {values.architecture!r:.100} is not supported in GGUF files. Supported: "
            f"{', '.join(supported_gguf_architectures())}. Use a safetensors checkpoint of the model, which may be "
            "supported."
        )
    for key, neutral, users in _UNUSED_SETTINGS:
        if values.architecture not in users:
            values.refuse_other(key, neutral)
    config: dict[str, Any] = {
        **family(values),
        "vocab_size": _vocab_size(values),
        "tie_word_embeddings": not values.has_tensor(_HEAD),
        "dtype": _dtype(model, values.architecture),
    }
    ids = {key: values.token_id(key) for key in ("bos_token_id", "eos_token_id")}
    known = {key: token for key, token in ids.items() if token is not None}
    # Explicitly null: the default of some families is outside of a small vocabulary.
    return {**config, **known, "pad_token_id": values.token_id("padding_token_id")}


def _vocab_size(values: Metadata) -> int:
    """Number of rows of the embedding, which may differ from the checkpoint and from the number of tokens."""
    shape, hidden_size = values.tensor(_EMBEDDING).shape, values.integer("embedding_length")
    if len(shape) != 2 or shape[1] != hidden_size:
        raise values.error(f"has tensor {_EMBEDDING!r} of shape {list(shape)}, expected [tokens, {hidden_size}]")
    return shape[0]


def _dtype(model: GGUFModel, architecture: str) -> str:
    """The model's dtype; float16 only if activations fit, since llama.cpp computes float16 files in float32."""
    types = {tensor.type.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    if types == {"F16"} and architecture not in _OVERFLOW_IN_FLOAT16:
        return "float16"
    return "float32" if types == {"F32"} else "bfloat16"


def _refuse_experts(values: Metadata) -> None:
    if values.integer("expert_count", 0, at_least=0):
        raise values.error(f"is a model of the architecture {values.architecture!r} with experts, not supported here")


# ----------------------------------------------------------------------------------------------------- dense families


def _llama(values: Metadata) -> dict[str, Any]:
    if values.integer("expert_count", 0, at_least=0):
        return gated(
            values,
            "MixtralForCausalLM",
            "mixtral",
            num_local_experts=num_experts(values),
            num_experts_per_tok=values.integer("expert_used_count"),
            sliding_window=values.integer("attention.sliding_window", 0, at_least=0) or None,
        )
    window = values.integer("attention.sliding_window", 0, at_least=0)
    if window:
        return gated(values, "MistralForCausalLM", "mistral", sliding_window=window)
    mlp_bias = has(values, "ffn_up.bias")
    return gated(values, "LlamaForCausalLM", "llama", attention_bias=attention_bias(values), mlp_bias=mlp_bias)


def _ministral3(values: Metadata) -> dict[str, Any]:
    config = gated(values, "Ministral3ForCausalLM", "ministral3", attention_bias=attention_bias(values))
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn" and not values.is_zero("rope.scaling.yarn_log_multiplier"):
        # llama.cpp takes `mscale` as one. Other than in deepseek2, `mscale_all_dim` is stored as it is.
        scaling |= {"mscale": 1.0, "mscale_all_dim": values.number("rope.scaling.yarn_log_multiplier")}
    if not values.is_zero("attention.temperature_scale"):
        if "original_max_position_embeddings" not in scaling:
            raise values.error("has 'mistral3.attention.temperature_scale' without YaRN, expected both")
        scaling["llama_4_scaling_beta"] = values.number("attention.temperature_scale")
    return config


def _qwen2(values: Metadata) -> dict[str, Any]:
    return gated(values, "Qwen2ForCausalLM", "qwen2", use_sliding_window=False)


def _qwen3(values: Metadata) -> dict[str, Any]:
    bias = attention_bias(values)
    return gated(values, "Qwen3ForCausalLM", "qwen3", use_sliding_window=False, attention_bias=bias)


def _gemma(values: Metadata, largest: int) -> dict[str, Any]:
    """Keys of Gemma 2 and 3. The model with `largest` layers has another scale of scores than the head size."""
    size = head_dim(values)
    if num_layers(values) == largest:
        size = values.integer("embedding_length") // values.integer("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": size,
        "attention_bias": attention_bias(values),
    }


def _gemma2(values: Metadata) -> dict[str, Any]:
    config = gated(
        values,
        "Gemma2ForCausalLM",
        "gemma2",
        **_gemma(values, largest=46),
        sliding_window=values.integer("attention.sliding_window", 4096),
        layer_types=window_types(values, 2),
        attn_logit_softcapping=values.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=values.number("final_logit_softcapping", 30.0),
    )
    del config["hidden_act"]
    return config


def _gemma3(values: Metadata) -> dict[str, Any]:
    window = values.integer("attention.sliding_window", 0, at_least=0)
    config = gated(
        values,
        "Gemma3ForCausalLM",
        "gemma3_text",
        **_gemma(values, largest=62),
        layer_types=window_types(values, 6) if window else ["full_attention"] * num_layers(values),
        rope_local_base_freq=values.number("rope.freq_base_swa", 10000.0),
        final_logit_softcapping=None,
    )
    if window:
        config["sliding_window"] = window
    if "final_logit_softcapping" in values:
        config["final_logit_softcapping"] = values.number("final_logit_softcapping")
    del config["hidden_act"]
    return config


def _phi3(values: Metadata) -> dict[str, Any]:
    # Old files of Phi-3 mini and medium with 4,096 tokens may lack the key.
    has_window = values.integer("context_length") == 4096 and num_layers(values) in (32, 40)
    window = values.integer("attention.sliding_window", 2047 if has_window else 0, at_least=0)
    config = gated(values, "Phi3ForCausalLM", "phi3", sliding_window=window or None)
    del config["head_dim"]  # always hidden_size / num_attention_heads in this family
    return config


def _granite(values: Metadata) -> dict[str, Any]:
    _refuse_experts(values)
    return gated(
        values,
        "GraniteForCausalLM",
        "granite",
        **_granite_scales(values),
        mlp_bias=has(values, "ffn_up.bias"),
    )


def _granite_moe(values: Metadata) -> dict[str, Any]:
    shared = values.integer("expert_shared_feed_forward_length", 0, at_least=0)
    return gated(
        values,
        "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM",
        "granitemoeshared" if shared else "granitemoe",
        **_granite_scales(values),
        num_local_experts=num_experts(values),
        num_experts_per_tok=values.integer("expert_used_count"),
        shared_intermediate_size=shared,
        fused_mlp=False,  # gate and up are separate tensors, and experts are read one by one
    )


def _granite_scales(values: Metadata) -> dict[str, Any]:
    if not values.boolean("rope.scaling.finetuned", True):
        raise values.error("is a Granite model without RoPE, which is not supported")
    return {
        "attention_bias": attention_bias(values),
        "attention_multiplier": values.number("attention.scale", 1 / math.sqrt(head_dim(values))),
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "logits_scaling": values.number("logit_scale"),
    }


def _glm(values: Metadata, architecture: str, model_type: str) -> dict[str, Any]:
    if "rope.dimension_sections" in values:
        raise values.error("has RoPE sections for images ('rope.dimension_sections'), which are not supported")
    config = gated(values, architecture, model_type, attention_bias=attention_bias(values))
    config.setdefault("partial_rotary_factor", 1.0)
    return config


def _glm4(values: Metadata) -> dict[str, Any]:
    return _glm(values, "Glm4ForCausalLM", "glm4")


def _chatglm(values: Metadata) -> dict[str, Any]:
    return _glm(values, "GlmForCausalLM", "glm")


def _olmo2(values: Metadata) -> dict[str, Any]:
    bias = attention_bias(values)
    window = values.integer("attention.sliding_window", 0, at_least=0)
    if not window:
        return gated(values, "Olmo2ForCausalLM", "olmo2", attention_bias=bias)
    types = window_types(values, 4)
    return gated(values, "Olmo3ForCausalLM", "olmo3", attention_bias=bias, sliding_window=window, layer_types=types)


def _exaone4(values: Metadata) -> dict[str, Any]:
    window = values.integer("attention.sliding_window", 0, at_least=0) or None
    types = window_types(values, 4) if window else ["full_attention"] * num_layers(values)
    return gated(values, "Exaone4ForCausalLM", "exaone4", sliding_window=window, layer_types=types)


def _smollm3(values: Metadata) -> dict[str, Any]:
    return gated(
        values,
        "SmolLM3ForCausalLM",
        "smollm3",
        no_rope_layer_interval=4,
        use_sliding_window=False,
        attention_bias=attention_bias(values),
        mlp_bias=has(values, "ffn_up.bias"),
    )


def _seed_oss(values: Metadata) -> dict[str, Any]:
    return gated(
        values,
        "SeedOssForCausalLM",
        "seed_oss",
        attention_bias=attention_bias(values),
        attention_out_bias=has(values, "attn_output.bias"),
        mlp_bias=has(values, "ffn_up.bias"),
    )


def _cohere2(values: Metadata) -> dict[str, Any]:
    config = decoder(
        values,
        "Cohere2ForCausalLM",
        "cohere2",
        intermediate_size=values.integer("feed_forward_length"),
        hidden_act="silu",
        layer_norm_eps=values.number("attention.layer_norm_epsilon"),
        logit_scale=values.number("logit_scale"),
        attention_bias=attention_bias(values),
        sliding_window=values.integer("attention.sliding_window"),
        layer_types=window_types(values, 4),
    )
    return {**config, **rope_config(values, head_dim(values), config["max_position_embeddings"])}


def _ernie4_5(values: Metadata) -> dict[str, Any]:
    return gated(values, "Ernie4_5ForCausalLM", "ernie4_5", use_bias=attention_bias(values))


def _hunyuan(values: Metadata) -> dict[str, Any]:
    bias = attention_bias(values)
    return gated(values, "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", attention_bias=bias)


def _starcoder2(values: Metadata) -> dict[str, Any]:
    config = decoder(
        values,
        "Starcoder2ForCausalLM",
        "starcoder2",
        intermediate_size=values.integer("feed_forward_length"),
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=values.number("attention.layer_norm_epsilon"),
        use_bias=attention_bias(values),
        sliding_window=values.integer("attention.sliding_window", 0, at_least=0) or None,
    )
    return {**config, **rope_config(values, head_dim(values), config["max_position_embeddings"])}


def _falcon(values: Metadata) -> dict[str, Any]:
    config = decoder(values, "FalconForCausalLM", "falcon")
    num_kv_heads = config.pop("num_key_value_heads")
    own_norms = has(values, "attn_norm_2.weight")
    rope = rope_config(values, head_dim(values), config["max_position_embeddings"])
    return {
        **config,
        **rope,
        "num_kv_heads": num_kv_heads,
        "multi_query": num_kv_heads == 1,
        "new_decoder_architecture": num_kv_heads != 1 or own_norms,
        "num_ln_in_parallel_attn": 2 if own_norms else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": attention_bias(values),
        "activation": "gelu",
        "ffn_hidden_size": values.integer("feed_forward_length", 4 * config["hidden_size"]),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
    }


def _gpt2(values: Metadata) -> dict[str, Any]:
    context_length = values.integer("context_length")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": values.integer("embedding_length"),
        "n_layer": num_layers(values),
        "n_head": values.integer("attention.head_count"),
        "n_inner": values.integer("feed_forward_length", 4 * values.integer("embedding_length")),
        "n_positions": context_length,
        "n_ctx": context_length,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
    }


# ----------------------------------------------------------------------------------------------- families with experts


def _qwen2_moe(values: Metadata) -> dict[str, Any]:
    return gated(
        values,
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        **_qwen_experts(values),
        qkv_bias=attention_bias(values),
        norm_topk_prob=values.boolean("expert_weights_norm", False),
        shared_expert_intermediate_size=rows_of(values, "ffn_up_shexp.weight", "expert_shared_feed_forward_length"),
    )


def _qwen3_moe(values: Metadata) -> dict[str, Any]:
    bias = attention_bias(values)
    return gated(
        values,
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        **_qwen_experts(values),
        attention_bias=bias,
        norm_topk_prob=values.boolean("expert_weights_norm", True),
    )


def _qwen_experts(values: Metadata) -> dict[str, Any]:
    dense = [layer for layer in range(num_layers(values)) if not values.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")]
    return {
        "num_experts": num_experts(values),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": rows_of(values, "ffn_up_exps.weight", "expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "use_sliding_window": False,
    }


def _large_moe(values: Metadata) -> dict[str, Any]:
    found = LARGE_MOE[values.architecture](values, num_experts(values), attention_bias(values))
    return gated(values, found.architecture, found.model_type, **found.settings)


def _gpt_oss(values: Metadata) -> dict[str, Any]:
    config = gated(
        values,
        "GptOssForCausalLM",
        "gpt_oss",
        intermediate_size=values.integer("expert_feed_forward_length"),
        num_local_experts=num_experts(values),
        num_experts_per_tok=values.integer("expert_used_count"),
        sliding_window=values.integer("attention.sliding_window"),
        layer_types=window_types(values, 2),
        attention_bias=attention_bias(values),
    )
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False  # as in all published models; files do not store it
    return config


_FAMILIES: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    **dict.fromkeys(LARGE_MOE, _large_moe),
    **HYBRID,
    "chatglm": _chatglm,
    "cohere2": _cohere2,
    "deepseek2": deepseek2,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": gemma4,
    "glm4": _glm4,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "hunyuan-dense": _hunyuan,
    "llama": _llama,
    "mistral3": _ministral3,
    "mistral4": mistral4,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen2vl": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3vl": _qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
