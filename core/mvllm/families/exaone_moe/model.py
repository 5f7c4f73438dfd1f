"""EXAONE with experts (K-EXAONE): DeepSeek V3's experts, windows, and no positional encoding on layers without one."""

from __future__ import annotations

import re

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.families.deepseek.model import DeepseekV3ForCausalLM
from mvllm.layers.context import BuildContext
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class ExaoneMoeForCausalLM(DeepseekV3ForCausalLM):
    """`ExaoneMoeForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers.

    Published checkpoints write the name as `ExaoneMoEForCausalLM`.
    """

    dense_layers = 1
    num_experts_key, num_shared_key = "num_experts", "num_shared_experts"
    num_shared_experts = 1
    correction_name = "e_score_correction_bias"
    routing_defaults = (2.5, 1, 1)
    ignored_names = re.compile(r"(^|\.)(rotary_emb\.inv_freq|mtp.*)$")

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Without `layer_types`, the last of every `sliding_window_pattern` layers has no window."""
        hf = config.hf_config
        windows: tuple[int | None, ...] = ()
        if config.sliding_window is not None:
            period = hf.positive_int("sliding_window_pattern", 4) if "layer_types" not in hf else 1
            windows = layer_windows(config, lambda layer: (layer + 1) % period == 0)
        return LlamaOptions(
            windows=windows,
            qk_norm=True,
            eps=hf.positive_number("rms_norm_eps", 1e-5),
            nope_layers=frozenset(layer for layer, window in enumerate(windows) if window is None),
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        return LlamaForCausalLM.build_attention(self, ctx, options, rotary, layer)
