"""Tiny random checkpoints of the families that cut images into tiles, with their processors.

Tiles have 4 x 4 patches, of which 2 x 2 become one embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Idefics3Config,
    InternVLConfig,
    Lfm2Config,
    Lfm2VlConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    SmolVLMConfig,
)

from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT

TILE = 16
PATCH = 4
IDEFICS3_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
INTERNVL_TOKENS = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
LFM2_VL_TOKENS = (
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)),
)
_NORMAL: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SQUARE = {**_TOWER, "image_size": TILE, "patch_size": PATCH}


def _idefics3(kind: Any = Idefics3Config, vision: dict[str, Any] | None = None, **settings: Any) -> Callable[[], Any]:
    text = LlamaConfig(**TEXT).to_dict()
    return lambda: kind(
        text_config=text,
        vision_config={**_SQUARE, **(vision or {})},
        image_token_id=FIRST_SPECIAL_ID,
        **{"tie_word_embeddings": False, **settings},
    )


def _internvl(text: Any, vision: dict[str, Any] | None = None, **settings: Any) -> Callable[[], Any]:
    sides = {"image_size": [TILE, TILE], "patch_size": [PATCH, PATCH]}
    return lambda: InternVLConfig(
        text_config=text.to_dict(),
        vision_config={**_TOWER, **sides, **(vision or {})},
        image_token_id=FIRST_SPECIAL_ID,
        image_seq_length=TILES_LENGTH,
        **{"tie_word_embeddings": False, **settings},
    )


def _lfm2_vl(vision: dict[str, Any] | None = None, **settings: Any) -> Callable[[], Any]:
    sizes = {**TEXT, "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}
    text = Lfm2Config(**sizes, layer_types=["conv", "full_attention", "conv"])
    return lambda: Lfm2VlConfig(
        text_config=text.to_dict(),
        vision_config={
            "model_type": "siglip2_vision_model",
            **_TOWER,
            "patch_size": PATCH,
            "num_patches": 9,
            "vision_use_head": False,
            **(vision or {}),
        },
        image_token_id=FIRST_SPECIAL_ID,
        **{"projector_hidden_size": 40, **settings},
    )


TILES_LENGTH = (TILE // PATCH // 2) ** 2
"""Embeddings of a tile."""

TILE_CONFIGS: dict[str, Callable[[], Any]] = {
    "idefics3": _idefics3(),
    "idefics3-other-positions": _idefics3(vision={"image_size": 28}, scale_factor=4),
    "smolvlm": _idefics3(SmolVLMConfig, vision={"hidden_act": "gelu"}, tie_word_embeddings=True),
    "internvl": _internvl(Qwen2Config(**TEXT)),
    "internvl-norms": _internvl(
        Qwen3Config(**TEXT, head_dim=16),
        vision={"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True, "use_mask_token": True},
        tie_word_embeddings=True,
        vision_feature_layer=-2,
    ),
    "internvl-last-norm": _internvl(
        Qwen2Config(**TEXT),
        vision={"use_mean_pooling": False, "image_size": [24, 24]},
        downsample_ratio=0.25,
        projector_hidden_act="silu",
    ),
    "lfm2_vl": _lfm2_vl(),
    "lfm2_vl-plain": _lfm2_vl(
        vision={"vision_use_head": True}, projector_use_layernorm=False, projector_bias=False, downsample_factor=1
    ),
}
"""Configs by name; the part of the name before `-` is the family."""
