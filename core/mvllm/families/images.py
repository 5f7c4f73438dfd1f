"""Language models behind a vision tower of `mvllm.models.vision`: LLaVA, LLaVA-OneVision, Gemma 3 and Mistral 3."""

from __future__ import annotations

from mvllm.config.encoder_parts import image_token_id, video_token_id, vision_config
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import Architecture, ModelFamily, ModelType
from mvllm.config.multimodal import MultiModalModel


def _patches(vision: HFConfig, image_size: int, patch_size: int) -> int:
    """Patches along each side of an image; the sizes are the family's defaults."""
    return vision.positive_int("image_size", image_size) // vision.positive_int("patch_size", patch_size)


def _llava(hf: HFConfig) -> MultiModalModel | None:
    vision = vision_config(hf)
    if vision is None:
        return None
    most = None if vision.get("model_type") == "pixtral" else _patches(vision, 224, 16) ** 2 + 1
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 32_000)},
        embedding_width=hf.positive_int("hidden_size"),
        max_encoded=most,
    )


def _llava_onevision(hf: HFConfig) -> MultiModalModel | None:
    if vision_config(hf) is None:
        return None
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 151_646), "video": video_token_id(hf, 151_647)},
        embedding_width=hf.positive_int("hidden_size"),
    )


def _gemma3(hf: HFConfig) -> MultiModalModel | None:
    if vision_config(hf) is None:
        return None
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 262_144)},
        embedding_width=hf.positive_int("hidden_size"),
        spans_attend_both_ways=True,
        max_encoded=hf.positive_int("mm_tokens_per_image", 256),
    )


def _mistral3(hf: HFConfig) -> MultiModalModel | None:
    if vision_config(hf) is None:
        return None
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 10)}, embedding_width=hf.positive_int("hidden_size")
    )


_VISION = "mvllm.models.vision"

FAMILY = ModelFamily(
    architectures={
        "LlavaForConditionalGeneration": Architecture(
            f"{_VISION}.llava:Llava", language_model="LlamaForCausalLM", read_items=_llava
        ),
        "LlavaOnevisionForConditionalGeneration": Architecture(
            f"{_VISION}.llava_onevision:LlavaOnevision",
            language_model="Qwen2ForCausalLM",
            read_items=_llava_onevision,
            items="mvllm.multimodal.item_families.llava_onevision:LlavaOnevisionItems",
        ),
        "Gemma3ForConditionalGeneration": Architecture(
            f"{_VISION}.gemma3:Gemma3", language_model="Gemma3ForCausalLM", read_items=_gemma3
        ),
        "Mistral3ForConditionalGeneration": Architecture(
            f"{_VISION}.mistral3:Mistral3",
            language_model="MistralForCausalLM",
            read_items=_mistral3,
            may_be_text=True,
        ),
    },
    model_types={
        "llava": ModelType(text_type="llama", tied_by_text=True),
        "llava_onevision": ModelType(text_type="qwen2", tied_by_text=True),
        "gemma3": ModelType(text_type="gemma3_text"),
        "mistral3": ModelType(text_type="mistral"),
    },
)
