"""Entries of the multimodal zoo: Idefics3, SmolVLM, InternVL and LFM2-VL, which cut images into tiles.

Tiles have 4 x 4 patches, of which 2 x 2 become one embedding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import (
    Idefics3Config,
    Idefics3Processor,
    InternVLConfig,
    InternVLProcessor,
    Lfm2Config,
    Lfm2VlConfig,
    Lfm2VlProcessor,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    SmolVLMConfig,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from mvllm.multimodal.item_families.lfm2_vl_image_processor import Lfm2VlImageProcessorPil
from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT, MultiModalEntry, without_video_processor

TILE = 16
PATCH = 4
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SQUARE = {**TOWER, "image_size": TILE, "patch_size": PATCH}
_SIDES = {**TOWER, "image_size": [TILE, TILE], "patch_size": [PATCH, PATCH]}
_IDEFICS3_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "global_image_token": "<global-img>",
    **{f"row_{row}_{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3)},
}
_SMOLVLM_TOKENS = {**_IDEFICS3_TOKENS, "video_token": "<video>"}
"""The tags of the third row are text of several tokens, as in a tokenizer that lacks them."""
_INTERNVL_TOKENS = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
_LFM2_VL_TOKENS = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
    **{f"row_{row}_{column}": f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)},
}


class SmolVLMFiles(Idefics3Processor):
    """Writes the files of SmolVLM's processor, whose class needs a package that is not installed for tests."""

    def save_pretrained(self, folder: Path, **settings: Any) -> None:
        super().save_pretrained(folder, **settings)
        path = folder / "processor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": "SmolVLMProcessor"}))


_SMOLVLM: dict[str, Any] = {
    "specials": _SMOLVLM_TOKENS,
    "video_placeholder": "<video>",
    "video_settings": {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}},
}
_OF_INTERNVL: dict[str, Any] = {
    "specials": _INTERNVL_TOKENS,
    "placeholder": "<IMG_CONTEXT>",
    "video_placeholder": "<video>",
    "video_settings": {"size": {"height": TILE, "width": TILE}},
}
_IDEFICS3_SIZES = {"size": {"longest_edge": 3 * TILE}, "max_image_size": {"longest_edge": TILE}}


def _idefics3_processor(tokenizer: Any, *, splits: bool = True) -> Any:
    images = Idefics3ImageProcessorPil(**_IDEFICS3_SIZES, do_image_splitting=splits)
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


def _smolvlm_processor(tokenizer: Any) -> Any:
    return SmolVLMFiles(SmolVLMImageProcessorPil(**_IDEFICS3_SIZES), tokenizer, image_seq_len=4)


def _internvl_processor(tokenizer: Any, length: int = 4, most: int = 4) -> Any:
    images = GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, max_patches=most)
    return without_video_processor(InternVLProcessor)(images, tokenizer, None, image_seq_length=length)


def _lfm2_vl_processor(tokenizer: Any, factor: int = 2) -> Any:
    tokens = {"min_image_tokens": 8 // factor**2, "max_image_tokens": 24 // factor**2}
    images = Lfm2VlImageProcessorPil(
        tile_size=TILE, encoder_patch_size=PATCH, downsample_factor=factor, max_tiles=4, **tokens
    )
    return Lfm2VlProcessor(images, tokenizer)


def _idefics3(
    kind: Any = Idefics3Config, vision: dict[str, Any] | None = None, kv_heads: int = 2, **settings: Any
) -> Any:
    return kind(
        text_config=LlamaConfig(**{**TEXT, "num_key_value_heads": kv_heads}).to_dict(),
        vision_config={**_SQUARE, **(vision or {})},
        image_token_id=FIRST_SPECIAL_ID,
        **{"tie_word_embeddings": False, **settings},
    )


def _internvl(text: Any, vision: dict[str, Any] | None = None, **settings: Any) -> Any:
    return InternVLConfig(
        text_config=text.to_dict(),
        vision_config={**_SIDES, **(vision or {})},
        image_token_id=FIRST_SPECIAL_ID,
        image_seq_length=4,
        **{"tie_word_embeddings": False, **settings},
    )


def _lfm2_vl(vision: dict[str, Any] | None = None, **settings: Any) -> Any:
    sizes = {**TEXT, "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}
    text = Lfm2Config(**sizes, layer_types=["conv", "full_attention", "conv"])
    tower = {**TOWER, "patch_size": PATCH, "num_patches": 9, "vision_use_head": False}
    return Lfm2VlConfig(
        text_config=text.to_dict(),
        vision_config={"model_type": "siglip2_vision_model", **tower, **(vision or {})},
        image_token_id=FIRST_SPECIAL_ID,
        **{"projector_hidden_size": 40, **settings},
    )


def _old_internvl_name(name: str) -> str:
    """Names of files before transformers 4.52."""
    for ours, theirs in (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


TILES: dict[str, MultiModalEntry] = {
    "idefics3": MultiModalEntry(
        config=_idefics3, processor=_idefics3_processor, specials=_IDEFICS3_TOKENS, gate=True, seed=2
    ),
    "idefics3-whole-images": MultiModalEntry(
        config=lambda: _idefics3(vision={"image_size": 28}),
        processor=lambda tokenizer: _idefics3_processor(tokenizer, splits=False),
        specials=_IDEFICS3_TOKENS,
    ),
    "smolvlm": MultiModalEntry(
        config=lambda: _idefics3(SmolVLMConfig, vision={"hidden_act": "gelu"}, tie_word_embeddings=True),
        processor=_smolvlm_processor,
        **_SMOLVLM,
    ),
    "smolvlm-small-tiles": MultiModalEntry(
        config=lambda: _idefics3(
            SmolVLMConfig,
            vision={"image_size": 24, "patch_size": 2, "num_hidden_layers": 3, "num_attention_heads": 2},
            scale_factor=4,
            kv_heads=1,
        ),
        processor=_smolvlm_processor,
        **_SMOLVLM,
    ),
    "internvl": MultiModalEntry(
        config=lambda: _internvl(Qwen2Config(**TEXT)),
        processor=_internvl_processor,
        **_OF_INTERNVL,
        gate=True,
    ),
    "internvl-norms-old": MultiModalEntry(
        config=lambda: _internvl(
            Qwen3Config(**TEXT, head_dim=16),
            vision={"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True, "use_mask_token": True},
            vision_feature_layer=-2,
        ),
        processor=_internvl_processor,
        **_OF_INTERNVL,
        rename=_old_internvl_name,
    ),
    "internvl-last-norm": MultiModalEntry(
        config=lambda: _internvl(
            Qwen2Config(**TEXT, tie_word_embeddings=True),
            vision={"use_mean_pooling": False, "image_size": [24, 24]},
            downsample_ratio=0.25,
            projector_hidden_act="silu",
            tie_word_embeddings=True,
        ),
        processor=lambda tokenizer: _internvl_processor(tokenizer, 1, 12),
        **_OF_INTERNVL,
    ),
    "lfm2_vl": MultiModalEntry(
        config=_lfm2_vl, processor=_lfm2_vl_processor, specials=_LFM2_VL_TOKENS, has_states=True, gate=True
    ),
    "lfm2_vl-plain": MultiModalEntry(
        config=lambda: _lfm2_vl(
            vision={"vision_use_head": True}, projector_use_layernorm=False, projector_bias=False, downsample_factor=1
        ),
        processor=lambda tokenizer: _lfm2_vl_processor(tokenizer, 1),
        specials=_LFM2_VL_TOKENS,
        has_states=True,
    ),
}
