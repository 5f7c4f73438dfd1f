"""Reads what each family takes beside text from its config.json. Needs no torch.

A family is an entry of FAMILIES: the architecture of its checkpoints, the architecture of its language model, and a
function that reads the rest. The vision or audio part is built by the model class of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mvllm.config.audio_families import AUDIO_FAMILIES
from mvllm.config.grid_families import GRID_FAMILIES
from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.config.retrieval_families import RETRIEVAL_FAMILIES
from mvllm.config.tile_families import TILE_FAMILIES
from mvllm.config.vision_families import VISION_FAMILIES

ReadFamily = Callable[[HFConfig], MultiModalModel | None]
"""Takes config.json, with the values of `text_config` at the top level (see `load_hf_config`). None: the checkpoint has
no vision or audio part."""

FAMILIES: Mapping[str, ReadFamily] = {
    **VISION_FAMILIES,
    **GRID_FAMILIES,
    **TILE_FAMILIES,
    **AUDIO_FAMILIES,
    **RETRIEVAL_FAMILIES,
}
"""By architecture."""


def multimodal_model(architecture: str, hf_config: HFConfig) -> MultiModalModel | None:
    """What a model takes beside text; None for text alone, as of checkpoints that are only the text part.

    Raises:
        ModelError: config.json lacks a value.
    """
    read = FAMILIES.get(architecture)
    return None if read is None else read(hf_config)
