"""Language models with images that are cut into tiles: Idefics3, SmolVLM, InternVL and LFM2-VL.

The number of tiles of an image is the processor's choice, so config.json does not bound the rows of an image.
"""

from __future__ import annotations

from mvllm.config.encoder_parts import image_token_id, vision_config
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import Architecture, ModelFamily, ModelType, ReadItems
from mvllm.config.multimodal import MultiModalModel


def _reader(default_id: int, *, with_videos: bool = False) -> ReadItems:
    """The reader of a family.

    Args:
        default_id: transformers' default of `image_token_id`.
        with_videos: The family takes videos. Their frames are marked as images are.
    """

    def read(hf: HFConfig) -> MultiModalModel | None:
        if vision_config(hf) is None:
            return None
        image = image_token_id(hf, default_id)
        return MultiModalModel(
            placeholders={"image": image, "video": image} if with_videos else {"image": image},
            embedding_width=hf.positive_int("hidden_size"),
            written_as={"video": "<video>"} if with_videos else {},
        )

    return read


_VISION, _ITEMS = "mvllm.models.vision", "mvllm.multimodal.item_families.tiles"

FAMILY = ModelFamily(
    architectures={
        "Idefics3ForConditionalGeneration": Architecture(
            f"{_VISION}.idefics3:Idefics3",
            language_model="LlamaForCausalLM",
            read_items=_reader(128_257),
            items=f"{_ITEMS}:Idefics3Items",
        ),
        "SmolVLMForConditionalGeneration": Architecture(
            f"{_VISION}.idefics3:Idefics3",
            language_model="LlamaForCausalLM",
            read_items=_reader(128_257, with_videos=True),
            items=f"{_ITEMS}:SmolVLMItems",
        ),
        "InternVLForConditionalGeneration": Architecture(
            f"{_VISION}.internvl:InternVL",
            language_model="Qwen2ForCausalLM",
            read_items=_reader(151_667, with_videos=True),
            items=f"{_ITEMS}:InternVLItems",
        ),
        "Lfm2VlForConditionalGeneration": Architecture(
            f"{_VISION}.lfm2_vl:Lfm2Vl",
            language_model="Lfm2ForCausalLM",
            read_items=_reader(396),
            items=f"{_ITEMS}:Lfm2VlItems",
        ),
    },
    model_types={
        "idefics3": ModelType(text_type="llama"),
        "smolvlm": ModelType(text_type="llama"),
        "internvl": ModelType(text_type="qwen2"),
        "lfm2_vl": ModelType(text_type="lfm2"),
    },
)
