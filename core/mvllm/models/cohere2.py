"""Cohere2 (Command R7B, Command A): attention and MLP in parallel after one layer norm without bias.

Layers with a window have interleaved rotary embedding, layers without one have no positional encoding (NoPE). Logits
are multiplied by `logit_scale`.
"""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.layers.norm import BiaslessLayerNorm
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LayerNorms, LlamaForCausalLM, LlamaOptions


class Cohere2ForCausalLM(LlamaForCausalLM):
    """`Cohere2ForCausalLM` of Hugging Face checkpoints."""

    ties_embeddings_by_default = True

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Without `layer_types`, the last of every `sliding_window_pattern` layers has no window."""
        hf = config.hf_config
        period = hf.positive_int("sliding_window_pattern", 4)
        windows = layer_windows(config, lambda layer: (layer + 1) % period == 0)
        bias = bool(hf.get("attention_bias", False))
        return LlamaOptions(
            windows=windows,
            qkv_bias=bias,
            output_bias=bias,
            norms=LayerNorms(before_mlp=None),
            parallel_blocks=True,
            norm=BiaslessLayerNorm,
            eps=hf.positive_number("layer_norm_eps", 1e-5),
            nope_layers=frozenset(layer for layer, window in enumerate(windows) if window is None),
            interleaved_rotary=True,
            logits_scale=1.0 / hf.positive_number("logit_scale", 0.0625),
        )
