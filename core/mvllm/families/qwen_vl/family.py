"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and ColQwen2, which gives a vector for each token of a Qwen2-VL."""

from __future__ import annotations

import dataclasses

from mvllm.config.grid_items import grid_items_reader
from mvllm.config.hf_config import HFConfig
from mvllm.config.model_family import Architecture, ModelFamily, ModelType
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ModelError

_read_qwen2 = grid_items_reader(151655, 151656, (16, 24, 24))
_QWEN2_VL = ("qwen2_vl", "qwen2_vl_text")


def deepstack_layers(vision: HFConfig) -> tuple[int, ...]:
    """The layers of Qwen3-VL's vision tower whose results are added behind the first layers of the language model.

    Raises:
        ModelError: `deepstack_visual_indexes` is not a list of different numbers of layers.
    """
    layers = vision.get("deepstack_visual_indexes", [8, 16, 24])
    depth = vision.positive_int("depth", 27)
    if (
        not isinstance(layers, list)
        or not all(type(layer) is int and 0 <= layer < depth for layer in layers)
        or len(set(layers)) != len(layers)
    ):
        raise ModelError(
            f"{vision.source}: 'deepstack_visual_indexes' should be a list of different numbers below {depth}, found "
            f"{layers!r}."
        )
    return tuple(layers)


def _num_deepstack_layers(vision: HFConfig) -> int:
    return len(deepstack_layers(vision))


_read_qwen3 = grid_items_reader(151655, 151656, (24, 20, 20), interleaved=True, further_rows=_num_deepstack_layers)


def _read_colqwen2(hf_config: HFConfig) -> MultiModalModel | None:
    model_type = hf_config.get("model_type")
    if model_type not in _QWEN2_VL:
        raise ModelError(f"{hf_config.source}: the model in 'vlm_config' should be a qwen2_vl, found {model_type!r}.")
    found = _read_qwen2(hf_config)
    if found is None:
        return None
    positions = hf_config.get("image_positions", "sequence")
    if positions not in ("sequence", "grid"):
        raise ModelError(f"{hf_config.source}: 'image_positions' should be 'sequence' or 'grid', found {positions!r}.")
    return dataclasses.replace(
        found,
        placeholders={"image": found.placeholders["image"]},
        rope_sections=found.rope_sections if positions == "grid" else None,
    )


_FOLDER = "mvllm.families.qwen_vl"
_ITEMS = f"{_FOLDER}.items"

FAMILY = ModelFamily(
    architectures={
        "Qwen2VLForConditionalGeneration": Architecture(
            f"{_FOLDER}.qwen2_vl:Qwen2VLForConditionalGeneration",
            read_items=_read_qwen2,
            items="mvllm.multimodal.item_families.grids:GridItems",
        ),
        "Qwen2_5_VLForConditionalGeneration": Architecture(
            f"{_FOLDER}.qwen2_vl:Qwen2_5_VLForConditionalGeneration",
            read_items=_read_qwen2,
            items=f"{_ITEMS}:Qwen2_5Items",
        ),
        "Qwen3VLForConditionalGeneration": Architecture(
            f"{_FOLDER}.qwen3_vl:Qwen3VLForConditionalGeneration",
            read_items=_read_qwen3,
            items=f"{_ITEMS}:Qwen3Items",
        ),
        "Qwen3VLMoeForConditionalGeneration": Architecture(
            f"{_FOLDER}.qwen3_vl:Qwen3VLMoeForConditionalGeneration",
            read_items=_read_qwen3,
            items=f"{_ITEMS}:Qwen3Items",
        ),
        "ColQwen2ForRetrieval": Architecture(
            f"{_FOLDER}.colqwen2:ColQwen2ForRetrieval",
            read_items=_read_colqwen2,
            items=f"{_ITEMS}:ColQwen2Items",
            gives_token_vectors=True,
        ),
    },
    model_types={
        # The first checkpoints of Qwen2-VL have a flat config.
        "qwen2_vl": ModelType(sliding_window=4096, use_sliding_window=False, tied_by_text=True),
        "qwen2_vl_text": ModelType(sliding_window=4096, use_sliding_window=False),
        "qwen2_5_vl": ModelType(sliding_window=4096, use_sliding_window=False, tied_by_text=True),
        "qwen2_5_vl_text": ModelType(sliding_window=4096, use_sliding_window=False),
        "qwen3_vl_text": ModelType(head_dim=128, never_sliding=True),
        "qwen3_vl_moe_text": ModelType(never_sliding=True),
    },
)
