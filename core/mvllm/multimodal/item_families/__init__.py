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
from mvllm.config.model_implementations import find_implementation, implementation_name
from mvllm.config.multimodal import MultiModalModel
from mvllm.multimodal.item_families.interface import ItemFamily


def item_family(
    architecture: str, processor: Any, model: MultiModalModel, hf_config: HFConfig, model_impl: str = "auto"
) -> ItemFamily:
    """What processes the items of an architecture.

    Args:
        architecture, hf_config, model_impl: As in ModelConfig.
        processor: transformers' processor of the checkpoint.
        model: What the model takes beside text.

    Raises:
        ConfigError: The package that runs the model cannot be loaded.
    """
    kind: type[ItemFamily] = ItemFamily
    found = find_architecture(architecture)
    if found is not None and found.items is not None:
        kind = _import_class(found.items)
    name = implementation_name(model_impl)
    if model.by_transformers and name is not None:
        implementation = find_implementation(name)
        if implementation is not None and implementation.items is not None:
            kind = type(kind.__name__, (_import_class(implementation.items), kind), {})
    return kind(processor, model, hf_config)


def _import_class(path: str) -> type[ItemFamily]:
    module, _, name = path.partition(":")
    found: type[ItemFamily] = getattr(importlib.import_module(module), name)
    return found
