"""Entries of the multimodal zoo: LLaVA, LLaVA-OneVision, Gemma 3, Gemma 4 and Mistral 3."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3Processor,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4Processor,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionProcessor,
    LlavaProcessor,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mvllm.multimodal.pixtral_processor import PixtralProcessor
from tests.helpers.multimodal_zoo import FIRST_SPECIAL_ID, TEXT, MultiModalEntry, without_video_processor

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}
"""Sizes of towers: images of 3 x 3 patches."""
_IMAGE = FIRST_SPECIAL_ID
_PIXTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_GEMMA_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_GEMMA4_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "video_token": "<|video|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_GEMMA_EMBEDDINGS = 0.08
"""These models multiply embeddings by the square root of their size."""
_TILES = [[24, 48], [48, 24], [48, 48], [72, 24], [72, 72]]


def _clip_processor(tokenizer: Any, strategy: str = "default") -> LlavaProcessor:
    sizes = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    settings = {"patch_size": 8, "vision_feature_select_strategy": strategy, "num_additional_image_tokens": 1}
    return LlavaProcessor(CLIPImageProcessorPil(**sizes), tokenizer, **settings)


def _siglip_processor(tokenizer: Any) -> LlavaProcessor:
    images = SiglipImageProcessorPil(size={"height": 24, "width": 24})
    return LlavaProcessor(images, tokenizer, patch_size=8, vision_feature_select_strategy="full")


def _onevision_processor(tokenizer: Any) -> Any:
    images = LlavaOnevisionImageProcessorPil(size={"height": 24, "width": 24}, image_grid_pinpoints=_TILES)
    settings = {"num_image_tokens": 9, "vision_feature_select_strategy": "full"}
    return without_video_processor(LlavaOnevisionProcessor)(images, tokenizer, None, **settings)


def _pixtral_processor(tokenizer: Any, merge: int = 1) -> Any:
    images = PixtralImageProcessorPil(size={"longest_edge": 48}, patch_size={"height": 8, "width": 8})
    return PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=merge)


def _gemma3_processor(tokenizer: Any) -> Gemma3Processor:
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3Processor(images, tokenizer, image_seq_length=4)


def gemma4_processor(tokenizer: Any, audio: Any = None) -> Any:
    """The processor of Gemma 4 with a feature extractor of audio."""
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
    kind = without_video_processor(Gemma4Processor)
    return kind(audio or Gemma4AudioFeatureExtractor(), images, tokenizer, None, image_seq_length=70)


def gemma4_config(*, clips: bool = False, both_ways: bool = True, **text: Any) -> Gemma4Config:
    """A config of Gemma 4 without audio."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "patch_size": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Gemma4Config(
        vision_config=Gemma4VisionConfig(
            **sizes, **heads, position_embedding_size=80, use_clipped_linears=clips, standardize=clips
        ),
        text_config=Gemma4TextConfig(
            **{**TEXT, "num_hidden_layers": 3, "pad_token_id": 0},
            head_dim=16,
            global_head_dim=32,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_window=80,
            use_bidirectional_attention="vision" if both_ways else None,
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": TEXT["vocab_size"], **text},
        ),
        audio_config=None,
        image_token_id=_IMAGE,
        boi_token_id=_IMAGE + 1,
        eoi_token_id=_IMAGE + 2,
        video_token_id=_IMAGE + 3,
        audio_token_id=_IMAGE + 4,
    )


def _gemma3(**text: Any) -> Gemma3Config:
    sizes = {**TEXT, "head_dim": 16, "num_hidden_layers": 3, "pad_token_id": 0}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3Config(
        vision_config=SiglipVisionConfig(**{**TOWER, "image_size": 32, "vision_use_head": False}),
        text_config=Gemma3TextConfig(**sizes, layer_types=kinds, query_pre_attn_scalar=16, **text),
        image_token_index=_IMAGE,
        boi_token_index=_IMAGE + 1,
        eoi_token_index=_IMAGE + 2,
        mm_tokens_per_image=4,
    )


def token_types(key: str) -> Any:
    """Extends the types of a prompt's tokens, which say where images are, by those of generated ones."""

    def extended(inputs: dict[str, Any], n: int) -> dict[str, Any]:
        types = inputs.get(key)
        if types is None:
            return inputs
        return {**inputs, key: torch.cat((types, types.new_zeros(1, n)), dim=1)}

    return extended


def name_before_4_52(name: str) -> str:
    """A tensor's name in LLaVA's files before transformers 4.52, from that in files that transformers 5 writes."""
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1) if name.startswith("vision_tower.") else name


def name_in_modules(name: str) -> str:
    """A tensor's name in transformers 5's modules, from that in files that it writes."""
    for written, ours in (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("image_newline", "model.image_newline"),
    ):
        if name.startswith(written):
            return ours + name.removeprefix(written)
    return name


_OF_ONEVISION: dict[str, Any] = {
    "specials": {"image_token": "<image>", "video_token": "<video>"},
    "video_placeholder": "<video>",
    "video_settings": {"size": {"height": 24, "width": 24}},
}
OF_GEMMA4: dict[str, Any] = {
    "specials": _GEMMA4_TOKENS,
    "placeholder": "<|image|>",
    "video_placeholder": "<|video|>",
    "video_settings": {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
    "inputs": token_types("mm_token_type_ids"),
    "embedding_scale": _GEMMA_EMBEDDINGS,
}

VISION: dict[str, MultiModalEntry] = {
    "llava": MultiModalEntry(
        config=lambda: LlavaConfig(
            vision_config=CLIPVisionConfig(**TOWER), text_config=LlamaConfig(**TEXT), image_token_index=_IMAGE
        ),
        processor=_clip_processor,
        gate=True,
    ),
    "llava-layers-old": MultiModalEntry(
        config=lambda: LlavaConfig(
            vision_config=CLIPVisionConfig(**TOWER, hidden_act="gelu"),
            text_config=MistralConfig(**TEXT, sliding_window=13),
            image_token_index=_IMAGE,
            vision_feature_layer=[-3, 1, -1],
            vision_feature_select_strategy="full",
            multimodal_projector_bias=False,
        ),
        processor=lambda tokenizer: _clip_processor(tokenizer, "full"),
        rename=name_before_4_52,
    ),
    "llava-siglip-tied": MultiModalEntry(
        config=lambda: LlavaConfig(
            vision_config=SiglipVisionConfig(**TOWER),
            text_config=Qwen2Config(**TEXT, tie_word_embeddings=True),
            image_token_index=_IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        processor=_siglip_processor,
        rename=name_in_modules,
    ),
    "llava-pixtral": MultiModalEntry(
        config=lambda: LlavaConfig(
            vision_config=PixtralVisionConfig(**TOWER),
            text_config=MistralConfig(**TEXT, sliding_window=None),
            image_token_index=_IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        processor=_pixtral_processor,
        specials=_PIXTRAL_TOKENS,
        placeholder="[IMG]",
    ),
    "llava_onevision": MultiModalEntry(
        config=lambda: LlavaOnevisionConfig(
            vision_config=SiglipVisionConfig(**TOWER, vision_use_head=False),
            text_config=Qwen2Config(**TEXT),
            image_token_index=_IMAGE,
            video_token_index=_IMAGE + 1,
            image_grid_pinpoints=_TILES,
        ),
        processor=_onevision_processor,
        **_OF_ONEVISION,
        gate=True,
    ),
    "llava_onevision-tied": MultiModalEntry(
        config=lambda: LlavaOnevisionConfig(
            vision_config=SiglipVisionConfig(**TOWER),
            text_config=Qwen2Config(**TEXT, tie_word_embeddings=True),
            image_token_index=_IMAGE,
            video_token_index=_IMAGE + 1,
            vision_feature_layer=[0, -2],
            image_grid_pinpoints=_TILES,
        ),
        processor=_onevision_processor,
        **_OF_ONEVISION,
    ),
    "mistral3": MultiModalEntry(
        config=lambda: Mistral3Config(
            vision_config=PixtralVisionConfig(**TOWER),
            text_config=MistralConfig(**TEXT, sliding_window=None, tie_word_embeddings=True),
            image_token_index=_IMAGE,
        ),
        processor=lambda tokenizer: _pixtral_processor(tokenizer, 2),
        specials=_PIXTRAL_TOKENS,
        placeholder="[IMG]",
        gate=True,
    ),
    "mistral3-ministral": MultiModalEntry(
        config=lambda: Mistral3Config(
            vision_config=PixtralVisionConfig(**TOWER, rope_parameters={"rope_type": "axial", "rope_theta": 100.0}),
            text_config=Ministral3Config(**TEXT, head_dim=16),
            image_token_index=_IMAGE,
            vision_feature_layer=-2,
            multimodal_projector_bias=True,
            tie_word_embeddings=False,
        ),
        processor=lambda tokenizer: _pixtral_processor(tokenizer, 2),
        specials=_PIXTRAL_TOKENS,
        placeholder="[IMG]",
    ),
    "gemma3-images": MultiModalEntry(
        config=lambda: _gemma3(sliding_window=16),
        processor=_gemma3_processor,
        specials=_GEMMA_TOKENS,
        placeholder="<start_of_image>",
        inputs=token_types("token_type_ids"),
        embedding_scale=_GEMMA_EMBEDDINGS,
        gate=True,
    ),
    "gemma3-short-window": MultiModalEntry(
        config=lambda: _gemma3(sliding_window=3, rope_scaling={"rope_type": "linear", "factor": 8.0}),
        processor=_gemma3_processor,
        specials=_GEMMA_TOKENS,
        placeholder="<start_of_image>",
        inputs=token_types("token_type_ids"),
        embedding_scale=_GEMMA_EMBEDDINGS,
    ),
    "gemma4-images": MultiModalEntry(
        config=gemma4_config,
        processor=gemma4_processor,
        **OF_GEMMA4,
        gate=True,
    ),
    "gemma4-per-layer": MultiModalEntry(
        config=lambda: gemma4_config(clips=True, both_ways=False, hidden_size_per_layer_input=8),
        processor=gemma4_processor,
        **OF_GEMMA4,
        has_stages=False,
    ),
}
