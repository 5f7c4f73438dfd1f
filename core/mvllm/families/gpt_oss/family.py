"""GPT-OSS: the record."""

from __future__ import annotations

from mvllm.config.model_family import Architecture, ModelFamily, ModelType

FAMILY = ModelFamily(
    architectures={"GptOssForCausalLM": Architecture("mvllm.families.gpt_oss.model:GptOssForCausalLM")},
    model_types={"gpt_oss": ModelType("GptOssForCausalLM", head_dim=64, sliding_window=128)},
)
