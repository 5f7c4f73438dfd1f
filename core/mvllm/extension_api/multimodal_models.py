"""For packages with a model that takes images, videos or audio: bases of its encoders and of its processing of items.

A record (`mvllm.extension_api.model_families`) names the classes: `Architecture.model` a model class whose
`item_encoder` is an `ItemEncoder`, and `Architecture.items` a subclass of `ItemFamily`.
"""

from __future__ import annotations

from mvllm.layers.item_rows import replace_ids as replace_ids
from mvllm.models.item_encoder import Features as Features
from mvllm.models.item_encoder import ItemEncoder as ItemEncoder
from mvllm.models.multimodal_model import MultiModalCausalLM as MultiModalCausalLM
from mvllm.models.multimodal_model import encoder_context as encoder_context
from mvllm.multimodal.contents import ItemContent as ItemContent
from mvllm.multimodal.item_families.interface import Features as ItemFeatures
from mvllm.multimodal.item_families.interface import ItemFamily as ItemFamily

__all__ = [
    "Features",
    "ItemContent",
    "ItemEncoder",
    "ItemFamily",
    "ItemFeatures",
    "MultiModalCausalLM",
    "encoder_context",
    "replace_ids",
]
