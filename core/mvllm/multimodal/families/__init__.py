"""How the items of each family of models are processed.

`ItemFamily` fits most families. A family that differs is a subclass in a module of this package, named in FAMILIES:

    class LlavaOnevisionItems(ItemFamily):
        def arguments(self, modality, counts): ...        # more than one image: no tiles

    FAMILIES = {"LlavaOnevisionForConditionalGeneration": "mvllm.multimodal.families.llava:LlavaOnevisionItems"}
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.multimodal.families.interface import ItemFamily
from mvllm.multimodal.families.through_transformers import ItemsOfTransformers

_GRIDS = "mvllm.multimodal.families.grids"

FAMILIES: Mapping[str, str] = {
    "Qwen2VLForConditionalGeneration": f"{_GRIDS}:GridItems",
    "Qwen2_5_VLForConditionalGeneration": f"{_GRIDS}:Qwen2_5Items",
    "ColQwen2ForRetrieval": f"{_GRIDS}:ColQwen2Items",
    "Qwen3VLForConditionalGeneration": f"{_GRIDS}:Qwen3Items",
    "Qwen3VLMoeForConditionalGeneration": f"{_GRIDS}:Qwen3Items",
    "Glm4vForConditionalGeneration": f"{_GRIDS}:GlmItems",
    "Glm46VForConditionalGeneration": f"{_GRIDS}:GlmItems",
    "Glm4vMoeForConditionalGeneration": f"{_GRIDS}:GlmItems",
    "Gemma4ForConditionalGeneration": "mvllm.multimodal.families.gemma4:Gemma4Items",
    "LlavaOnevisionForConditionalGeneration": "mvllm.multimodal.families.llava_onevision:LlavaOnevisionItems",
    "Idefics3ForConditionalGeneration": "mvllm.multimodal.families.tiles:Idefics3Items",
    "SmolVLMForConditionalGeneration": "mvllm.multimodal.families.tiles:SmolVLMItems",
    "InternVLForConditionalGeneration": "mvllm.multimodal.families.tiles:InternVLItems",
    "Lfm2VlForConditionalGeneration": "mvllm.multimodal.families.tiles:Lfm2VlItems",
    "VoxtralForConditionalGeneration": "mvllm.multimodal.families.voxtral:VoxtralItems",
    "WhisperForConditionalGeneration": "mvllm.multimodal.families.whisper:WhisperItems",
}
"""By architecture: `module:class`."""


def item_family(architecture: str, processor: Any, model: MultiModalModel, hf_config: HFConfig) -> ItemFamily:
    """The family of an architecture."""
    kind: type[ItemFamily] = ItemFamily
    if (path := FAMILIES.get(architecture)) is not None:
        module, name = path.split(":")
        kind = getattr(importlib.import_module(module), name)
    if model.by_transformers:
        kind = type(kind.__name__, (ItemsOfTransformers, kind), {})
    return kind(processor, model, hf_config)
