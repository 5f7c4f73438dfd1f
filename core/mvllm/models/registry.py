"""Model classes by architecture name in `config.json`. A model's module is imported when it is resolved.

Other packages add architectures through entry points of `mvllm.models`: the name is the architecture, the value
`package.module:Class`, a CausalLM. Core's class takes precedence over a plugin's of the same name.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from mvllm import plugin_groups
from mvllm.errors import ModelError
from mvllm.logging import get_logger

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM

logger = get_logger(__name__)

_MODELS = {
    "LlamaForCausalLM": "mvllm.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "mvllm.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "mvllm.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "mvllm.models.qwen3:Qwen3ForCausalLM",
    "MixtralForCausalLM": "mvllm.models.mixtral:MixtralForCausalLM",
    "Qwen2MoeForCausalLM": "mvllm.models.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM": "mvllm.models.qwen3_moe:Qwen3MoeForCausalLM",
    "GptOssForCausalLM": "mvllm.models.gpt_oss:GptOssForCausalLM",
    "DeepseekV2ForCausalLM": "mvllm.models.deepseek:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "mvllm.models.deepseek:DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM": "mvllm.models.deepseek:DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM": "mvllm.models.glm_moe_dsa:GlmMoeDsaForCausalLM",
    "Glm4MoeForCausalLM": "mvllm.models.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "mvllm.models.glm4_moe:Glm4MoeLiteForCausalLM",
    "MiniMaxM2ForCausalLM": "mvllm.models.minimax_m2:MiniMaxM2ForCausalLM",
    "Ernie4_5_MoeForCausalLM": "mvllm.models.ernie4_5_moe:Ernie4_5_MoeForCausalLM",
    "HunYuanMoEV1ForCausalLM": "mvllm.models.hunyuan_moe:HunYuanMoEV1ForCausalLM",
    "Llama4ForCausalLM": "mvllm.models.llama4:Llama4ForCausalLM",
    "Llama4ForConditionalGeneration": "mvllm.models.llama4:Llama4ForConditionalGeneration",
    "Cohere2MoeForCausalLM": "mvllm.models.cohere2_moe:Cohere2MoeForCausalLM",
    "ExaoneMoeForCausalLM": "mvllm.models.exaone_moe:ExaoneMoeForCausalLM",
    "ExaoneMoEForCausalLM": "mvllm.models.exaone_moe:ExaoneMoeForCausalLM",
    "OPTForCausalLM": "mvllm.models.opt:OPTForCausalLM",
    "GPT2LMHeadModel": "mvllm.models.gpt2:GPT2LMHeadModel",
    "Gemma2ForCausalLM": "mvllm.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "mvllm.models.gemma3:Gemma3ForCausalLM",
    "Phi3ForCausalLM": "mvllm.models.phi3:Phi3ForCausalLM",
    "GraniteForCausalLM": "mvllm.models.granite:GraniteForCausalLM",
    "Olmo2ForCausalLM": "mvllm.models.olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "mvllm.models.olmo3:Olmo3ForCausalLM",
    "SmolLM3ForCausalLM": "mvllm.models.smollm3:SmolLM3ForCausalLM",
    "SeedOssForCausalLM": "mvllm.models.seed_oss:SeedOssForCausalLM",
    "Exaone4ForCausalLM": "mvllm.models.exaone4:Exaone4ForCausalLM",
    "Cohere2ForCausalLM": "mvllm.models.cohere2:Cohere2ForCausalLM",
    "Ministral3ForCausalLM": "mvllm.models.ministral3:Ministral3ForCausalLM",
    "Mistral4ForCausalLM": "mvllm.models.mistral4:Mistral4ForCausalLM",
    "Ernie4_5ForCausalLM": "mvllm.models.ernie4_5:Ernie4_5ForCausalLM",
    "Ernie4_5_ForCausalLM": "mvllm.models.ernie4_5:Ernie4_5ForCausalLM",
    "HunYuanDenseV1ForCausalLM": "mvllm.models.hunyuan:HunYuanDenseV1ForCausalLM",
    "Gemma4ForCausalLM": "mvllm.models.gemma4:Gemma4ForCausalLM",
    "GlmForCausalLM": "mvllm.models.glm:GlmForCausalLM",
    "Glm4ForCausalLM": "mvllm.models.glm:Glm4ForCausalLM",
    "Starcoder2ForCausalLM": "mvllm.models.starcoder2:Starcoder2ForCausalLM",
    "FalconForCausalLM": "mvllm.models.falcon:FalconForCausalLM",
    "BambaForCausalLM": "mvllm.models.bamba:BambaForCausalLM",
    "GraniteMoeForCausalLM": "mvllm.models.granite_moe:GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM": "mvllm.models.granite_moe:GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM": "mvllm.models.granite_moe_hybrid:GraniteMoeHybridForCausalLM",
    "FalconH1ForCausalLM": "mvllm.models.falcon_h1:FalconH1ForCausalLM",
    "NemotronHForCausalLM": "mvllm.models.nemotron_h:NemotronHForCausalLM",
    "Mamba2ForCausalLM": "mvllm.models.mamba2:Mamba2ForCausalLM",
    "Qwen3NextForCausalLM": "mvllm.models.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "mvllm.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "mvllm.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "mvllm.models.qwen3_5:Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "mvllm.models.qwen3_5:Qwen3_5MoeForCausalLM",
    "Lfm2ForCausalLM": "mvllm.models.lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "mvllm.models.lfm2:Lfm2MoeForCausalLM",
    "KimiLinearForCausalLM": "mvllm.models.kimi_linear:KimiLinearForCausalLM",
    "OlmoHybridForCausalLM": "mvllm.models.olmo_hybrid:OlmoHybridForCausalLM",
    "Qwen2VLForConditionalGeneration": "mvllm.models.qwen2_vl:Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration": "mvllm.models.qwen2_vl:Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration": "mvllm.models.qwen3_vl:Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration": "mvllm.models.qwen3_vl:Qwen3VLMoeForConditionalGeneration",
    "Glm4vForConditionalGeneration": "mvllm.models.glm4v:Glm4vForConditionalGeneration",
    "Glm46VForConditionalGeneration": "mvllm.models.glm4v:Glm46VForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration": "mvllm.models.glm4v:Glm4vMoeForConditionalGeneration",
    "WhisperForConditionalGeneration": "mvllm.models.audio.whisper:WhisperForConditionalGeneration",
    "ColQwen2ForRetrieval": "mvllm.models.colqwen2:ColQwen2ForRetrieval",
}

_MULTIMODAL = {
    "LlavaForConditionalGeneration": ("mvllm.models.vision.llava:Llava", "LlamaForCausalLM"),
    "LlavaOnevisionForConditionalGeneration": (
        "mvllm.models.vision.llava_onevision:LlavaOnevision",
        "Qwen2ForCausalLM",
    ),
    "Gemma3ForConditionalGeneration": ("mvllm.models.vision.gemma3:Gemma3", "Gemma3ForCausalLM"),
    "Gemma4ForConditionalGeneration": ("mvllm.models.vision.gemma4:Gemma4", "Gemma4ForCausalLM"),
    "Mistral3ForConditionalGeneration": ("mvllm.models.vision.mistral3:Mistral3", "MistralForCausalLM"),
    "Idefics3ForConditionalGeneration": ("mvllm.models.vision.idefics3:Idefics3", "LlamaForCausalLM"),
    "SmolVLMForConditionalGeneration": ("mvllm.models.vision.idefics3:Idefics3", "LlamaForCausalLM"),
    "InternVLForConditionalGeneration": ("mvllm.models.vision.internvl:InternVL", "Qwen2ForCausalLM"),
    "Lfm2VlForConditionalGeneration": ("mvllm.models.vision.lfm2_vl:Lfm2Vl", "Lfm2ForCausalLM"),
    "Qwen2AudioForConditionalGeneration": ("mvllm.models.audio.qwen2_audio:Qwen2Audio", "Qwen2ForCausalLM"),
    "VoxtralForConditionalGeneration": ("mvllm.models.audio.voxtral:Voxtral", "LlamaForCausalLM"),
}
"""Classes that stand before the class of a language model, see `MultiModalCausalLM`, and the architecture of the
language model that checkpoints of the family have if they do not name one."""

_POOLING = "mvllm.models.pooling_model:PoolingModel"
_CLASSIFICATION = "mvllm.models.pooling_model:SequenceClassificationModel"
_POOLING_DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Next")
_ENCODERS = {"Bert": "Bert", "Roberta": "Roberta", "XLMRoberta": "Roberta", "DistilBert": "DistilBert"}

_BASES: dict[str, tuple[str, ...]] = {
    **{name: (path,) for name, path in _MODELS.items()},
    **{f"{name}Model": (_POOLING, _MODELS[f"{name}ForCausalLM"]) for name in _POOLING_DECODERS},
    **{
        f"{name}ForSequenceClassification": (_CLASSIFICATION, _MODELS[f"{name}ForCausalLM"])
        for name in _POOLING_DECODERS
    },
    # `ModelKind` says which head an encoder has, so one class serves all of them.
    **{
        f"{name}{head}": (f"mvllm.models.bert:{encoder}",)
        for name, encoder in _ENCODERS.items()
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
    },
}
"""Base classes of each architecture's class, as `module:class`. A single base of that name is the class itself."""


def supported_architectures() -> tuple[str, ...]:
    """Native architectures, sorted: core's and those of installed plugins."""
    return tuple(sorted({*_BASES, *_MULTIMODAL, *plugin_groups.allowed_names(plugin_groups.MODELS)}))


def is_native(architecture: str) -> bool:
    """Whether core or an installed plugin has a class for `architecture`.

    Raises:
        ConfigError: A plugin has it, but is not allowed, or several have it.
    """
    if architecture in _BASES or architecture in _MULTIMODAL:
        return True
    return plugin_groups.find(plugin_groups.MODELS, architecture) is not None


def resolve_model_class(architecture: str, model_impl: str = "auto", language: str = "") -> type[CausalLM]:
    """The class that runs checkpoints of `architecture`.

    Args:
        model_impl: As in ModelConfig.
        language: `ModelConfig.language_architecture`.

    Raises:
        ModelError: There is none (the message lists the supported ones), or a plugin's class is not a CausalLM.
        ConfigError: The plugin that has it is not allowed, or cannot be loaded.
    """
    if model_impl == "transformers" or (model_impl == "auto" and not is_native(architecture)):
        return _fallback(architecture)
    if architecture in _BASES or architecture in _MULTIMODAL:
        for plugin in plugin_groups.list_plugins(plugin_groups.MODELS):
            if plugin.name == architecture:
                logger.warning("%s has a class for %s, but core's own class is used.", plugin, architecture)
        return _core_class(architecture, language)
    source = plugin_groups.find(plugin_groups.MODELS, architecture)
    if source is None:
        raise ModelError(
            f"The architecture {architecture!r} is not supported. Supported: {', '.join(supported_architectures())}."
        )
    found = plugin_groups.load(plugin_groups.MODELS, source)
    from mvllm.models.causal_lm import CausalLM

    if not (isinstance(found, type) and issubclass(found, CausalLM)):
        raise ModelError(f"{source} must name a subclass of mvllm.extension_api.CausalLM, found {found!r}.")
    return found


@functools.cache
def _core_class(architecture: str, language: str) -> type[CausalLM]:
    paths = (path.partition(":") for path in _base_paths(architecture, language))
    bases = tuple(getattr(importlib.import_module(module), name) for module, _, name in paths)
    if len(bases) == 1 and bases[0].__name__ == architecture:
        return bases[0]
    return type(architecture, bases, {"__doc__": f"`{architecture}` of Hugging Face checkpoints."})


def _base_paths(architecture: str, language: str) -> tuple[str, ...]:
    """Base classes of an architecture's class, as `module:class`."""
    if architecture not in _MULTIMODAL:
        return _BASES[architecture]
    path, usual = _MULTIMODAL[architecture]
    language = language or usual
    if language not in _MODELS:
        raise ModelError(
            f"The architecture {architecture!r} with the language model {language!r} is not supported: core has no "
            "class for this language model. Check `model_type` of `text_config` in config.json."
        )
    return path, _MODELS[language]


def _fallback(architecture: str) -> type[CausalLM]:
    from mvllm.models.transformers_backend.supported_classes import has_encoders, unsupported_reason

    reason = unsupported_reason(architecture)
    if reason is not None:
        raise ModelError(
            f"The architecture {architecture!r} is not supported. Supported: {', '.join(supported_architectures())}. "
            f"As for others: {reason}"
        )
    if has_encoders(architecture):
        from mvllm.models.transformers_backend.multimodal import TransformersMultiModalForCausalLM

        return TransformersMultiModalForCausalLM
    from mvllm.models.transformers_backend.model import TransformersForCausalLM

    return TransformersForCausalLM
