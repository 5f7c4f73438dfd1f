"""How the items of models are processed.

`ItemFamily` fits most families. A family that differs has a subclass, which its record names (`Architecture.items`):

    class LlavaOnevisionItems(ItemFamily):
        def arguments(self, modality, counts): ...        # more than one image: no tiles

This package has those that several families share.
"""

from __future__ import annotations

import importlib
from typing import Any

from mvllm.config.families import find_architecture
from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.multimodal.item_families.interface import ItemFamily
from mvllm.multimodal.item_families.through_transformers import ItemsOfTransformers


def item_family(architecture: str, processor: Any, model: MultiModalModel, hf_config: HFConfig) -> ItemFamily:
    """What processes the items of an architecture."""
    kind: type[ItemFamily] = ItemFamily
    found = find_architecture(architecture)
    if found is not None and found.items is not None:
        module, name = found.items.split(":")
        kind = getattr(importlib.import_module(module), name)
    if model.by_transformers:
        kind = type(kind.__name__, (ItemsOfTransformers, kind), {})
    return kind(processor, model, hf_config)
