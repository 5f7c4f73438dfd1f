"""Gemma 2: Llama with norms before and after each block, soft-capped scores and logits, windows on every other layer.

Checkpoints store the norms' weights minus one. Embeddings are scaled by the square root of their size, and attention
scores by `query_pre_attn_scalar`.
"""

from __future__ import annotations

from typing import Any

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.norm import GemmaRMSNorm
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions

GEMMA_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class Gemma2ForCausalLM(LlamaForCausalLM):
    """`Gemma2ForCausalLM` of Hugging Face checkpoints."""

    ties_embeddings_by_default = True

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Even layers have a window."""
        windows = layer_windows(config, lambda layer: layer % 2 == 1)
        caps = (
            number_or_default(config, "attn_logit_softcapping", 50.0),
            number_or_default(config, "final_logit_softcapping", 30.0),
        )
        return LlamaOptions(windows, soft_cap=caps[0], logits_soft_cap=caps[1], **gemma_options(config))


def gemma_options(config: ModelConfig) -> dict[str, Any]:
    """The options that Gemma 2 and 3 share.

    Raises:
        ModelError: The checkpoint uses bidirectional attention.
    """
    hf = config.hf_config
    if hf.get("use_bidirectional_attention", False):
        raise ModelError(
            f"{hf.source}: use_bidirectional_attention is set, which is not supported. Use a checkpoint with causal "
            "attention."
        )
    bias = bool(hf.get("attention_bias", False))
    return {
        "norms": GEMMA_NORMS,
        "norm": GemmaRMSNorm,
        "qkv_bias": bias,
        "output_bias": bias,
        "hidden_act": hf.get("hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": hf.positive_number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": config.hidden_size**0.5,
    }


def number_or_default(config: ModelConfig, key: str, absent: float | None) -> float | None:
    """The number of `key`; None if it is null, `absent` if the config does not have the key."""
    hf = config.hf_config
    if key not in hf.as_dict():
        return absent
    return hf.positive_number(key, 1.0) if key in hf else None
