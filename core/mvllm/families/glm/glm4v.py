"""GLM-4V (GLM-4.1V and later), dense and with experts: GLM-4 with three positions per token, and a vision tower."""

from __future__ import annotations

from dataclasses import replace

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.families.glm.glm4 import Glm4ForCausalLM
from mvllm.families.glm.glm4_moe import Glm4MoeForCausalLM
from mvllm.families.glm.glm4v_tower import Glm4vTower
from mvllm.models.grid_model import GridModel
from mvllm.models.llama import LlamaOptions


class Glm4vForConditionalGeneration(GridModel, Glm4ForCausalLM):
    """`Glm4vForConditionalGeneration` and `Glm46VForConditionalGeneration` of Hugging Face checkpoints."""

    tower = Glm4vTower

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """GLM-4's options; query, key and value have biases, and the whole head is rotated by default."""
        hf = config.hf_config
        return replace(
            super().options(config),
            qkv_bias=True,
            eps=hf.positive_number("rms_norm_eps", 1e-5),
            rope=RopeParameters.from_config(hf, config.head_size, partial=1.0),
        )


class Glm4vMoeForConditionalGeneration(GridModel, Glm4MoeForCausalLM):
    """`Glm4vMoeForConditionalGeneration` of Hugging Face checkpoints."""

    tower = Glm4vTower

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """GLM-4's options with experts; query, key and value have biases by default."""
        bias = bool(config.hf_config.get("attention_bias", True))
        return replace(super().options(config), qkv_bias=bias, qk_norm=False)
