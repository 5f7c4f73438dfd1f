"""Ministral 3: Mistral with YaRN, and queries that grow with the position beyond the original context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import rope_settings
from mvllm.models.llama import LlamaOptions
from mvllm.models.mistral import MistralForCausalLM


class Ministral3ForCausalLM(MistralForCausalLM):
    """`Ministral3ForCausalLM` of Hugging Face checkpoints, and the text part of multimodal ones."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Mistral's options with the factor on queries."""
        hf = config.hf_config
        return replace(
            super().options(config),
            eps=hf.positive_number("rms_norm_eps", 1e-5),
            query_scaling=query_scaling(hf, rope_settings(hf)),
        )


def query_scaling(hf: HFConfig, settings: dict[str, Any]) -> tuple[float, int] | None:
    """The option of that name: `llama_4_scaling_beta` and the original context of the RoPE settings.

    Raises:
        ModelError: A setting is not a number > 0.
    """
    values = HFConfig(settings, f"{hf.source}, RoPE settings")
    if not values.get("llama_4_scaling_beta"):
        return None
    beta = values.positive_number("llama_4_scaling_beta", 0.1)
    return beta, values.positive_int("original_max_position_embeddings")
