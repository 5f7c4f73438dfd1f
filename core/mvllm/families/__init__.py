"""The families of models: a folder for each unusual one, `plain.py` for those that are one file in `mvllm.models`.

    <name>/family.py    FAMILY, the record; how its config.json is read. Imports no torch
    <name>/model.py     the language model, with layers that only it has beside it
    <name>/vision.py    towers and projectors
    <name>/items.py     how its images, videos and audio are processed

What several families share is in `mvllm.models`, `mvllm.layers` and `mvllm.multimodal`, which import no family.
"""

from __future__ import annotations

from collections.abc import Mapping

_RECORDS = {
    "audio": (
        "Qwen2AudioForConditionalGeneration VoxtralForConditionalGeneration",
        "qwen2_audio voxtral",
    ),
    "deepseek.family": (
        "DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM",
        "deepseek_v2 deepseek_v3 deepseek_v32",
    ),
    "exaone_moe.family": ("ExaoneMoeForCausalLM ExaoneMoEForCausalLM", "exaone_moe"),
    "gemma4.family": ("Gemma4ForCausalLM Gemma4ForConditionalGeneration", "gemma4_text"),
    "glm.family": (
        "GlmForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM "
        "Glm4vForConditionalGeneration Glm46VForConditionalGeneration Glm4vMoeForConditionalGeneration",
        "glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa glm4v glm4v_moe glm4v_text glm4v_moe_text",
    ),
    "gpt_oss.family": ("GptOssForCausalLM", "gpt_oss"),
    "images": (
        "LlavaForConditionalGeneration LlavaOnevisionForConditionalGeneration Gemma3ForConditionalGeneration "
        "Mistral3ForConditionalGeneration Idefics3ForConditionalGeneration SmolVLMForConditionalGeneration "
        "InternVLForConditionalGeneration Lfm2VlForConditionalGeneration",
        "llava llava_onevision gemma3 mistral3 idefics3 smolvlm internvl lfm2_vl",
    ),
    "kimi_linear.family": ("KimiLinearForCausalLM", "kimi_linear"),
    "llama4.family": ("Llama4ForCausalLM Llama4ForConditionalGeneration", "llama4 llama4_text"),
    "mistral4.family": ("Mistral4ForCausalLM", "mistral4"),
    "nemotron_h.family": ("NemotronHForCausalLM", "nemotron_h"),
    "qwen3_next.family": (
        "Qwen3NextForCausalLM Qwen3NextModel Qwen3NextForSequenceClassification Qwen3_5ForCausalLM "
        "Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration",
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
    ),
    "qwen_vl.family": (
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
        "Qwen3VLMoeForConditionalGeneration ColQwen2ForRetrieval",
        "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text",
    ),
    "whisper.family": ("WhisperForConditionalGeneration", "whisper"),
}
"""By module of this package: the architectures and the model types of its record, which is imported for these alone."""


def architectures() -> Mapping[str, str]:
    """The module of the record of each architecture."""
    from mvllm.families.plain import FAMILY

    listed = {name: f"{__name__}.{module}" for module, (names, _) in _RECORDS.items() for name in names.split()}
    return {**dict.fromkeys(FAMILY.architectures, f"{__name__}.plain"), **listed}


def model_types() -> Mapping[str, str]:
    """The module of the record of each model type."""
    from mvllm.families.plain import FAMILY

    listed = {name: f"{__name__}.{module}" for module, (_, names) in _RECORDS.items() for name in names.split()}
    return {**dict.fromkeys(FAMILY.model_types, f"{__name__}.plain"), **listed}
