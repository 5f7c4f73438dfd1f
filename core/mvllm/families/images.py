"""Language models behind a vision tower of `mvllm.models.vision`.

Where images are cut into tiles (LLaVA-OneVision, Idefics3, SmolVLM, InternVL, LFM2-VL), their number is the processor's
choice, so config.json does not bound the rows of an image.
"""

from __future__ import annotations

from mvllm.config.encoder_parts import image_items_reader, image_token_id, vision_config
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import Architecture, ModelFamily, ModelType
from mvllm.config.multimodal import MultiModalModel


def _llava(hf: HFConfig) -> MultiModalModel | None:
    vision = vision_config(hf)
    if vision is None:
        return None
    most = None
    if vision.get("model_type") != "pixtral":
        most = (vision.positive_int("image_size", 224) // vision.positive_int("patch_size", 16)) ** 2 + 1
    return MultiModalModel(
        placeholders={"image": image_token_id(hf, 32_000)},
        embedding_width=hf.positive_int("hidden_size"),
        max_encoded=most,
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


_VISION, _TILES = "mvllm.models.vision", "mvllm.multimodal.item_families.tiles"

FAMILY = ModelFamily(
    architectures={
        "LlavaForConditionalGeneration": Architecture(
            f"{_VISION}.llava:Llava", language_model="LlamaForCausalLM", read_items=_llava
        ),
        "LlavaOnevisionForConditionalGeneration": Architecture(
            f"{_VISION}.llava_onevision:LlavaOnevision",
            language_model="Qwen2ForCausalLM",
            read_items=image_items_reader(151_646, 151_647),
            items="mvllm.multimodal.item_families.llava_onevision:LlavaOnevisionItems",
        ),
        "Gemma3ForConditionalGeneration": Architecture(
            f"{_VISION}.gemma3:Gemma3", language_model="Gemma3ForCausalLM", read_items=_gemma3
        ),
        "Mistral3ForConditionalGeneration": Architecture(
            f"{_VISION}.mistral3:Mistral3",
            language_model="MistralForCausalLM",
            read_items=image_items_reader(10),
            may_be_text=True,
        ),
        "Idefics3ForConditionalGeneration": Architecture(
            f"{_VISION}.idefics3:Idefics3",
            language_model="LlamaForCausalLM",
            read_items=image_items_reader(128_257),
            items=f"{_TILES}:Idefics3Items",
        ),
        "SmolVLMForConditionalGeneration": Architecture(
            f"{_VISION}.idefics3:Idefics3",
            language_model="LlamaForCausalLM",
            read_items=image_items_reader(128_257, frames_are_images=True),
            items=f"{_TILES}:SmolVLMItems",
        ),
        "InternVLForConditionalGeneration": Architecture(
            f"{_VISION}.internvl:InternVL",
            language_model="Qwen2ForCausalLM",
            read_items=image_items_reader(151_667, frames_are_images=True),
            items=f"{_TILES}:InternVLItems",
        ),
        "Lfm2VlForConditionalGeneration": Architecture(
            f"{_VISION}.lfm2_vl:Lfm2Vl",
            language_model="Lfm2ForCausalLM",
            read_items=image_items_reader(396),
            items=f"{_TILES}:Lfm2VlItems",
        ),
    },
    model_types={
        "llava": ModelType(text_type="llama", tied_by_text=True),
        "llava_onevision": ModelType(text_type="qwen2", tied_by_text=True),
        "gemma3": ModelType(text_type="gemma3_text"),
        "mistral3": ModelType(text_type="mistral"),
        "idefics3": ModelType(text_type="llama"),
        "smolvlm": ModelType(text_type="llama"),
        "internvl": ModelType(text_type="qwen2"),
        "lfm2_vl": ModelType(text_type="lfm2"),
    },
)
