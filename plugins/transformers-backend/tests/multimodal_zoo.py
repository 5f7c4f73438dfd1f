"""Tiny multimodal checkpoints that run through transformers: of native families, and of others.

Qwen2.5-VL has three-dimensional positions; in Gemma 3 the tokens of an image see later ones. LLaVA-NeXT and Aya Vision
cut images into tiles, VipLLaVA reads several layers of its tower, GLM-ASR takes sounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import (
    AyaVisionConfig,
    AyaVisionProcessor,
    CLIPVisionConfig,
    Cohere2Config,
    GlmAsrConfig,
    GlmAsrEncoderConfig,
    GlmAsrProcessor,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextProcessor,
    MistralConfig,
    SiglipVisionConfig,
    VipLlavaConfig,
    WhisperFeatureExtractor,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT, MultiModalEntry
from tests.helpers.zoo_grids import GRIDS
from tests.helpers.zoo_vision import TOWER, VISION, _clip_processor, name_before_4_52

THROUGH = "transformers"
_TILES = [[24, 48], [48, 24], [48, 48]]
_MEL_BINS = 8
_AYA_TOKENS = {
    "image_token": "<image>",
    "img_patch_token": "<|IMG_PATCH|>",
    "start_of_img_token": "<|START_OF_IMG|>",
    "end_of_img_token": "<|END_OF_IMG|>",
    "tile_global_token": "TILE_GLOBAL",
}
_GLMASR_TOKENS = {"audio_token": "<|pad|>"}


def _llava_next_processor(tokenizer: Any) -> LlavaNextProcessor:
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}, image_grid_pinpoints=_TILES
    )
    settings = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(images, tokenizer, **settings)


def _aya_processor(tokenizer: Any) -> AyaVisionProcessor:
    images = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=3)
    return AyaVisionProcessor(images, tokenizer, patch_size=8, img_size=32, downsample_factor=2)


def _glmasr_processor(tokenizer: Any) -> GlmAsrProcessor:
    sounds = WhisperFeatureExtractor(feature_size=_MEL_BINS, chunk_length=2)
    return GlmAsrProcessor(sounds, tokenizer, audio_token="<|pad|>")


def _glmasr(**settings: Any) -> GlmAsrConfig:
    audio = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GlmAsrConfig(
        audio_config=GlmAsrEncoderConfig(**audio, num_mel_bins=_MEL_BINS, max_position_embeddings=100),
        text_config=LlamaConfig(**TEXT),
        audio_token_id=FIRST_SPECIAL_ID,
        **{"tie_word_embeddings": False, **settings},
    )


TRANSFORMERS: dict[str, MultiModalEntry] = {
    "llava-through": replace(VISION["llava"], model_impl=THROUGH, gate=False),
    "qwen2_5_vl-through": replace(GRIDS["qwen2_5_vl"], model_impl=THROUGH, gate=False),
    "gemma3-through": replace(VISION["gemma3-images"], model_impl=THROUGH, gate=False),
    "llava_next-through": MultiModalEntry(
        config=lambda: LlavaNextConfig(
            vision_config=CLIPVisionConfig(**TOWER),
            text_config=MistralConfig(**TEXT, sliding_window=None),
            image_token_index=FIRST_SPECIAL_ID,
            image_grid_pinpoints=_TILES,
        ),
        processor=_llava_next_processor,
        model_impl=THROUGH,
        gate=True,
    ),
    "aya_vision-through": MultiModalEntry(
        config=lambda: AyaVisionConfig(
            vision_config=SiglipVisionConfig(**{**TOWER, "image_size": 32, "vision_use_head": False}),
            text_config=Cohere2Config(
                **{**TEXT, "num_hidden_layers": 3, "pad_token_id": 0},
                sliding_window=13,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            image_token_index=FIRST_SPECIAL_ID + 1,
        ),
        processor=_aya_processor,
        specials=_AYA_TOKENS,
        model_impl=THROUGH,
    ),
    "vipllava-through-old": MultiModalEntry(
        config=lambda: VipLlavaConfig(
            vision_config=CLIPVisionConfig(**TOWER),
            text_config=LlamaConfig(**TEXT),
            image_token_index=FIRST_SPECIAL_ID,
            vision_feature_layer=[-2, 1],
        ),
        processor=_clip_processor,
        rename=name_before_4_52,
        model_impl=THROUGH,
    ),
    "glmasr-through": MultiModalEntry(
        config=_glmasr,
        processor=_glmasr_processor,
        specials=_GLMASR_TOKENS,
        placeholder="<|pad|>",
        modality="audio",
        sizes=((3, 0), (24, 0), (6, 0)),
        model_impl=THROUGH,
    ),
}


def through_transformers() -> Mapping[str, MultiModalEntry]:
    """The entries, for `tests.helpers.multimodal_suite`."""
    return TRANSFORMERS
