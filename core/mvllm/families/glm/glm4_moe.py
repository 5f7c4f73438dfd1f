"""GLM-4 with experts (GLM-4.5 to 4.7): DeepSeek V3's experts behind GLM's attention, or, in Lite, behind DeepSeek's."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.families.deepseek.model import DeepseekV3ForCausalLM
from mvllm.layers.context import BuildContext
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions

_EPS = 1e-5


class Glm4MoeForCausalLM(DeepseekV3ForCausalLM):
    """`Glm4MoeForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers."""

    dense_layers = 1
    num_shared_experts = 1
    routing_defaults = (1.0, 1, 1)

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Half of each head is rotated by default; norms on queries and keys are optional."""
        hf = config.hf_config
        return LlamaOptions(
            qkv_bias=bool(hf.get("attention_bias", False)),
            qk_norm=bool(hf.get("use_qk_norm", False)),
            eps=hf.positive_number("rms_norm_eps", _EPS),
            rope=RopeParameters.from_config(hf, config.head_size, partial=0.5),
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        return LlamaForCausalLM.build_attention(self, ctx, options, rotary, layer)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """`Glm4MoeLiteForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers."""

    dense_layers = 1
    num_shared_experts = 1
    routing_defaults = (1.8, 1, 1)

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """DeepSeek's options with another default epsilon."""
        hf = config.hf_config
        return replace(
            super().options(config),
            eps=hf.positive_number("rms_norm_eps", _EPS),
            rope=RopeParameters.from_config(hf, config.head_size, partial=1.0),
        )
