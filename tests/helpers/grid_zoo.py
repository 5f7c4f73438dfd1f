"""Tiny random checkpoints of Qwen-VL and GLM-4V, for tests of their towers, positions and engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Glm4vConfig,
    Glm4vMoeConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from tests.helpers.multimodal_zoo import TEXT

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 320, 321, 322, 323
_IDS = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}
_QWEN_IDS = {**_IDS, "vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": TEXT["hidden_size"],
}
_QWEN2_VISION = {
    "depth": 3,
    "embed_dim": 32,
    "hidden_size": TEXT["hidden_size"],
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def _rope(sections: list[int], **settings: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": sections, **settings}
    }


def _qwen2(**text: Any) -> Any:
    settings = {**TEXT, **_rope([2, 3, 3]), **text}
    return Qwen2VLConfig(text_config=settings, vision_config=_QWEN2_VISION, **_QWEN_IDS)


def _qwen2_5(vision: dict[str, Any] | None = None, *, tied: bool = False, **text: Any) -> Any:
    vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 3, **(vision or {})}
    settings = {**TEXT, **_rope([2, 3, 3]), **text}
    return Qwen2_5_VLConfig(text_config=settings, vision_config=vision, tie_word_embeddings=tied, **_QWEN_IDS)


def _qwen3(kind: Any = Qwen3VLConfig, vision: dict[str, Any] | None = None, *, tied: bool = False, **text: Any) -> Any:
    vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [2, 0], **(vision or {})}
    settings = {**TEXT, "head_dim": 16, "num_hidden_layers": 4, **_rope([4, 2, 2], mrope_interleaved=True), **text}
    return kind(text_config=settings, vision_config=vision, tie_word_embeddings=tied, **_QWEN_IDS)


def _glm(kind: Any = Glm4vConfig, vision: dict[str, Any] | None = None, **text: Any) -> Any:
    vision = {**_VISION, "image_size": 20, **(vision or {})}
    settings = {**TEXT, **_rope([2, 1, 1], partial_rotary_factor=0.5), **text}
    ids = {"image_start_token_id": 322, "image_end_token_id": 323}
    videos = {"video_start_token_id": 324, "video_end_token_id": 325}
    return kind(text_config=settings, vision_config=vision, **_IDS, **ids, **videos)


GRID_CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2vl": _qwen2,
    "qwen2.5vl": _qwen2_5,
    "qwen2.5vl-tied": lambda: _qwen2_5(
        {"window_size": 24, "fullatt_block_indexes": [0, 2], "hidden_act": "gelu"},
        tied=True,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    ),
    "qwen3vl": _qwen3,
    "qwen3vl-tied": lambda: _qwen3(
        vision={"deepstack_visual_indexes": [1], "num_position_embeddings": 49}, tied=True, attention_bias=True
    ),
    "qwen3vlmoe": lambda: _qwen3(Qwen3VLMoeConfig, **_EXPERTS),
    "qwen3vlmoe-mixed": lambda: _qwen3(Qwen3VLMoeConfig, **_EXPERTS, mlp_only_layers=[1], num_key_value_heads=1),
    "glm4v": _glm,
    "glm4v-biases": lambda: _glm(vision={"attention_bias": True, "image_size": 16}, **_rope([3, 3, 2])),
    "glm4vmoe": lambda: _glm(
        Glm4vMoeConfig,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
}
"""By name: makes the config of transformers."""
