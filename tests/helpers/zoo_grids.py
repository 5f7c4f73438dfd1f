"""Entries of the multimodal zoo: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and GLM-4V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm4vProcessor,
    Glm46VConfig,
    Glm46VProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT, MultiModalEntry, without_video_processor
from tests.helpers.zoo_vision import token_types

IMAGE_ID, VIDEO_ID, START_ID, END_ID = range(FIRST_SPECIAL_ID, FIRST_SPECIAL_ID + 4)
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
GLM_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
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
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def _rope(sections: list[int], **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": sections, **settings}}


def _qwen2(*, tied: bool = False, **text: Any) -> Any:
    settings = {**TEXT, **_rope([2, 3, 3]), **text}
    return Qwen2VLConfig(text_config=settings, vision_config=_QWEN2_VISION, tie_word_embeddings=tied, **_QWEN_IDS)


def _qwen2_5(vision: dict[str, Any] | None = None, *, tied: bool = False, **text: Any) -> Any:
    vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 3, **(vision or {})}
    settings = {**TEXT, **_rope([2, 3, 3]), **text}
    return Qwen2_5_VLConfig(text_config=settings, vision_config=vision, tie_word_embeddings=tied, **_QWEN_IDS)


def _qwen3(kind: Any = Qwen3VLConfig, vision: dict[str, Any] | None = None, *, tied: bool = False, **text: Any) -> Any:
    vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [2, 0], **(vision or {})}
    settings = {**TEXT, "head_dim": 16, "num_hidden_layers": 4, **_rope([4, 2, 2], mrope_interleaved=True), **text}
    return kind(text_config=settings, vision_config=vision, tie_word_embeddings=tied, **_QWEN_IDS)


def _glm(kind: Any = Glm4vConfig, vision: dict[str, Any] | None = None, *, tied: bool = False, **text: Any) -> Any:
    vision = {**_VISION, "image_size": 20, **(vision or {})}
    settings = {**TEXT, **_rope([2, 1, 1], partial_rotary_factor=0.5), **text}
    ids = {"image_start_token_id": START_ID, "image_end_token_id": END_ID}
    videos = {"video_start_token_id": END_ID + 1, "video_end_token_id": END_ID + 2}
    return kind(text_config=settings, vision_config=vision, tie_word_embeddings=tied, **_IDS, **ids, **videos)


def _glm_moe(**settings: Any) -> Any:
    experts: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    return _glm(Glm4vMoeConfig, **experts, n_shared_experts=1, first_k_dense_replace=1, **settings)


def _qwen_processor(kind: Any) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        images = Qwen2VLImageProcessorPil(**_IMAGES)
        return without_video_processor(kind)(images, tokenizer, None)

    return make


def _glm_processor(tokenizer: Any, kind: Any = Glm4vProcessor, of_images: Any = Glm4vImageProcessorPil) -> Any:
    # Two frames of the same image are counted.
    size = {name: 2 * pixels for name, pixels in _IMAGES["size"].items()}
    return without_video_processor(kind)(of_images(**{**_IMAGES, "size": size}), tokenizer, None)


_IMAGES: dict[str, Any] = {"patch_size": 4, "size": {"shortest_edge": 8 * 8, "longest_edge": 48 * 48}}
_OF_QWEN: dict[str, Any] = {
    "specials": QWEN_TOKENS,
    "placeholder": "<|image_pad|>",
    "video_placeholder": "<|vision_start|><|video_pad|><|vision_end|>",
    "video_settings": {**_IMAGES, "image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD},
    "inputs": token_types("mm_token_type_ids"),
}
_OF_GLM: dict[str, Any] = {
    **_OF_QWEN,
    "specials": GLM_TOKENS,
    "placeholder": "<|image|>",
    "video_placeholder": "<|begin_of_video|><|video|><|end_of_video|>",
    "video_settings": {"patch_size": 4, "size": {"shortest_edge": 2 * 8 * 8, "longest_edge": 2 * 48 * 48}},
}
_VIDEOS_OF_MOE = {**_OF_GLM["video_settings"], "video_processor_type": "Glm4vVideoProcessor"}
_OF_GLM_MOE = {**_OF_GLM, "video_settings": _VIDEOS_OF_MOE}
_QWEN2, _QWEN2_5, _QWEN3 = (_qwen_processor(kind) for kind in (Qwen2VLProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor))

GRIDS: dict[str, MultiModalEntry] = {
    "qwen2_vl": MultiModalEntry(_qwen2, _QWEN2, **_OF_QWEN),
    "qwen2_vl-tied": MultiModalEntry(lambda: _qwen2(tied=True, num_key_value_heads=1), _QWEN2, **_OF_QWEN),
    "qwen2_5_vl": MultiModalEntry(_qwen2_5, _QWEN2_5, **_OF_QWEN, gate=True),
    "qwen2_5_vl-tied": MultiModalEntry(
        lambda: _qwen2_5(
            {"window_size": 24, "fullatt_block_indexes": [0, 2], "hidden_act": "gelu"},
            tied=True,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=1,
        ),
        _QWEN2_5,
        **_OF_QWEN,
    ),
    "qwen3_vl": MultiModalEntry(_qwen3, _QWEN3, **_OF_QWEN, gate=True),
    "qwen3_vl-tied": MultiModalEntry(
        lambda: _qwen3(
            vision={"deepstack_visual_indexes": [1], "num_position_embeddings": 49}, tied=True, attention_bias=True
        ),
        _QWEN3,
        **_OF_QWEN,
    ),
    "qwen3_vl_moe": MultiModalEntry(lambda: _qwen3(Qwen3VLMoeConfig, **_EXPERTS), _QWEN3, **_OF_QWEN, gate=True),
    "qwen3_vl_moe-mixed": MultiModalEntry(
        lambda: _qwen3(Qwen3VLMoeConfig, **_EXPERTS, mlp_only_layers=[1]), _QWEN3, **_OF_QWEN
    ),
    "glm4v": MultiModalEntry(_glm, _glm_processor, **_OF_GLM, gate=True),
    "glm4v-biases": MultiModalEntry(
        lambda: _glm(vision={"attention_bias": True, "image_size": 16}, **_rope([3, 3, 2])), _glm_processor, **_OF_GLM
    ),
    "glm46v": MultiModalEntry(
        lambda: _glm(Glm46VConfig),
        lambda tokenizer: _glm_processor(tokenizer, Glm46VProcessor, Glm46VImageProcessorPil),
        **_OF_GLM,
    ),
    "glm46v-tied": MultiModalEntry(
        lambda: _glm(
            Glm46VConfig,
            vision={"num_heads": 4, "intermediate_size": 24, "image_size": 28, "attention_bias": True},
            tied=True,
            num_key_value_heads=4,
        ),
        lambda tokenizer: _glm_processor(tokenizer, Glm46VProcessor, Glm46VImageProcessorPil),
        **_OF_GLM,
    ),
    "glm4v_moe": MultiModalEntry(_glm_moe, _glm_processor, **_OF_GLM_MOE),
    "glm4v_moe-no-biases": MultiModalEntry(
        lambda: _glm_moe(attention_bias=False, norm_topk_prob=False), _glm_processor, **_OF_GLM_MOE
    ),
}
