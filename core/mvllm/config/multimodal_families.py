"""Reads what each family takes beside text from its config.json. Needs no torch.

A family is an entry of FAMILIES: the architecture of its checkpoints, the architecture of its language model, and a
function that reads the rest. The vision or audio part is built by the model class of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mvllm.config import grid_families
from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel

ReadFamily = Callable[[HFConfig], MultiModalModel]
"""Takes config.json, with the values of `text_config` at the top level (see `load_hf_config`)."""

FAMILIES: Mapping[str, ReadFamily] = {
    "Qwen2VLForConditionalGeneration": grid_families.qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": grid_families.qwen2_vl,
    "Qwen3VLForConditionalGeneration": grid_families.qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": grid_families.qwen3_vl,
    "Glm4vForConditionalGeneration": grid_families.glm4v,
    "Glm46VForConditionalGeneration": grid_families.glm4v,
    "Glm4vMoeForConditionalGeneration": grid_families.glm4v_moe,
}
"""By architecture."""


def multimodal_model(architecture: str, hf_config: HFConfig) -> MultiModalModel | None:
    """What a model takes beside text; None for text alone.

    Raises:
        ModelError: config.json lacks a value.
    """
    read = FAMILIES.get(architecture)
    return None if read is None else read(hf_config)
