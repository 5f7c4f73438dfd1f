"""Tiny random checkpoints of families that cover the cases of the transformers backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import AutoModelForCausalLM

from tests.helpers.model_zoo import VOCAB_SIZE

_SIZES = {
    "vocab_size": VOCAB_SIZE,
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
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Family:
    """One checkpoint.

    Attributes:
        config: Name of transformers' config class.
        settings: Settings in addition to the usual sizes; None omits one.
        ranks: Maximum tensor-parallel size.
    """

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2


# A name begins with the checkpoint's `model_type`.
ZOO: dict[str, Family] = {
    # Families that also have native classes.
    "llama": Family("Llama"),
    "llama-tied-biases": Family("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3": Family("Qwen3", {"head_dim": 16}),
    "mistral": Family("Mistral", {"sliding_window": 9}),
    "qwen2-layer-types": Family("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "layer_types": _MIXED}),
    # Soft caps of scores and logits, scaled embeddings, windows on every other layer.
    "gemma2": Family(
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    # Attention sinks, experts.
    "gpt_oss": Family(
        "GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}, ranks=1
    ),
    # Scaled logits, parallel layers, norms over whole heads: their weights are not in the tensor-parallel plan.
    "cohere": Family("Cohere", {"use_qk_norm": True, "logit_scale": 0.5}, ranks=1),
    "cohere2": Family("Cohere2", {"sliding_window": 9, "logit_scale": 0.5, "layer_types": _MIXED}),
    # Queries, keys and values in one matrix, head by head; half of each head is rotated; an LM head with another name.
    "gpt_neox": Family("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": None}),
    # An LM head with a bias.
    "phi": Family("Phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    # Layers without positional encoding.
    "smollm3": Family("SmolLM3", {"no_rope_layer_interval": 2}),
    # No tensor-parallel plan.
    "hunyuan_v1_dense": Family("HunYuanDenseV1", {"head_dim": 16}, ranks=1),
    # Experts in separate tensors in the checkpoint, with other names in part.
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, ranks=1),
    # Experts and a shared expert; a mask that no layer uses.
    "qwen2_moe": Family(
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        ranks=1,
    ),
    # MLA, computed as heads whose values are smaller than their keys.
    "deepseek_v3": Family(
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        ranks=1,
    ),
    # An LM head that calls a part of the model, and is narrower than its layers.
    "opt": Family(
        "OPT",
        {
            "ffn_dim": 96,
            "intermediate_size": None,
            "num_key_value_heads": None,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
        ranks=1,
    ),
    # Matrices that are all-gathered and split.
    "olmo2": Family("Olmo2"),
}


def make_checkpoint(name: str, folder: Path) -> Path:
    """Writes checkpoint `name` into `folder`."""
    family = ZOO[name]
    settings = {
        key: value
        for key, value in {**_SIZES, **family.settings}.items()
        if (key, value) != (key, None) or key == "pad_token_id"
    }
    config = getattr(transformers, f"{family.config}Config")(**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_draw(parameter_name, parameter.shape, generator))
    model.save_pretrained(folder)
    return folder


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise if name.endswith("weight") else 0.05 * noise
    if len(shape) == 1:
        return 0.3 * noise
    if "embed_positions" in name:
        return 0.8 * noise
    if any(part in name for part in ("embed_tokens", "embed_in")):
        return 0.4 * noise
    return noise * (1.4 / math.sqrt(shape[-1]))
