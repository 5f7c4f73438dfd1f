"""Encoders of multimodal models against transformers: the embeddings of images, float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaOnevisionConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2Config,
    SiglipVisionConfig,
)

from mvllm.models.causal_lm import CausalLM
from mvllm.models.vision.llava_onevision import best_size
from tests.helpers.multimodal_zoo import TEXT, save_model
from tests.helpers.overwriting_ops import overwriting_providers
from tests.helpers.paged_driver import load_model, make_context

TOLERANCE = 2e-5
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}


def _gemma4(**settings: bool) -> Gemma4Config:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "patch_size": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Gemma4Config(
        vision_config=Gemma4VisionConfig(**sizes, **heads, position_embedding_size=16, **settings),
        text_config=Gemma4TextConfig(**TEXT, head_dim=16, global_head_dim=32, hidden_size_per_layer_input=0),
        audio_config=None,
        image_token_id=320,
        video_token_id=321,
        audio_token_id=322,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llava-clip": lambda: LlavaConfig(
        vision_config=CLIPVisionConfig(**_TOWER), text_config=LlamaConfig(**TEXT), image_token_index=320
    ),
    "llava-clip-layers": lambda: LlavaConfig(
        vision_config=CLIPVisionConfig(**_TOWER, hidden_act="gelu"),
        text_config=Qwen2Config(**TEXT, tie_word_embeddings=True),
        image_token_index=320,
        vision_feature_layer=[-3, 1, -1],
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
    ),
    "llava-siglip": lambda: LlavaConfig(
        vision_config=SiglipVisionConfig(**_TOWER),
        text_config=Qwen2Config(**TEXT),
        image_token_index=320,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "llava-pixtral": lambda: LlavaConfig(
        vision_config=PixtralVisionConfig(**_TOWER),
        text_config=LlamaConfig(**TEXT),
        image_token_index=320,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "llava_onevision": lambda: LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**_TOWER, vision_use_head=False),
        text_config=Qwen2Config(**TEXT),
        image_token_index=320,
        video_token_index=321,
        image_grid_pinpoints=[[24, 48], [48, 24], [48, 48], [72, 24], [96, 96]],
    ),
    "llava_onevision-shrunk": lambda: LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**_TOWER),
        text_config=Qwen2Config(**TEXT),
        image_token_index=320,
        video_token_index=321,
        vision_feature_layer=[0, -2],
        image_grid_pinpoints=[[48, 48], [96, 96]],
        vision_aspect_ratio="anyres_max_2",
    ),
    "gemma3": lambda: Gemma3Config(
        vision_config=SiglipVisionConfig(**{**_TOWER, "image_size": 32}),
        text_config=Gemma3TextConfig(**TEXT, head_dim=16),
        image_token_index=320,
        mm_tokens_per_image=4,
    ),
    "mistral3": lambda: Mistral3Config(
        vision_config=PixtralVisionConfig(**_TOWER),
        text_config=MistralConfig(**TEXT, tie_word_embeddings=True),
        image_token_index=320,
    ),
    "mistral3-ministral": lambda: Mistral3Config(
        vision_config=PixtralVisionConfig(**_TOWER, rope_parameters={"rope_type": "axial", "rope_theta": 100.0}),
        text_config=Ministral3Config(**TEXT, head_dim=16),
        image_token_index=320,
        vision_feature_layer=-2,
        multimodal_projector_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma4": lambda: _gemma4(use_clipped_linears=False, standardize=False),
    "gemma4-clipped": lambda: _gemma4(use_clipped_linears=True, standardize=True),
}
SIZES = [(32, 16), (16, 48), (40, 32)]


def _images(name: str) -> list[dict[str, torch.Tensor]]:
    """The features of three images."""
    generator = torch.Generator().manual_seed(1)
    if "pixtral" in name or "mistral3" in name:
        return [
            {
                "pixel_values": torch.randn(1, 3, height, width, generator=generator),
                "image_sizes": torch.tensor([[height, width]]),
            }
            for height, width in SIZES
        ]
    if "onevision" in name:
        sizes = CONFIGS[name]().image_grid_pinpoints
        images = []
        for height, width in ((90, 80), (30, 47), (48, 20)):
            size = best_size([tuple(each) for each in sizes], height, width)
            pixels = torch.randn(1, math.prod(size) // 24**2 + 1, 3, 24, 24, generator=generator)
            images.append({"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])})
        return images
    if "gemma4" in name:
        return [_gemma4_image(rows, columns, generator) for rows, columns in ((3, 6), (9, 3), (6, 6))]
    side = 32 if "gemma3" in name else 24
    return [{"pixel_values": torch.randn(1, 3, side, side, generator=generator)} for _ in range(3)]


def _gemma4_image(rows: int, columns: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Patches from left to right and from above, then padding."""
    count, most = rows * columns, 45
    positions = torch.full((most, 2), -1)
    positions[:count] = torch.stack(
        (torch.arange(columns).repeat(rows), torch.arange(rows).repeat_interleave(columns)), -1
    )
    pixels = torch.zeros(most, 48)
    pixels[:count] = torch.rand(count, 48, generator=generator)
    return {"pixel_values": pixels.unsqueeze(0), "image_position_ids": positions.unsqueeze(0)}


def _expected(model: Any, image: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat(list(model.get_image_features(**image).pooler_output))


def _encoded(model: CausalLM, images: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    assert model.item_encoder is not None
    with torch.inference_mode():
        return model.item_encoder.encode("image", images)


@pytest.mark.parametrize("name", CONFIGS)
def test_images_have_the_embeddings_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_model(CONFIGS[name](), tmp_path)
    model, images = load_model(tmp_path), _images(name)
    together = _encoded(load_model(tmp_path, make_context(providers=overwriting_providers())), images)
    for image, found in zip(images, together, strict=True):
        wanted = _expected(reference, image)
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
        (alone,) = _encoded(model, [image])
        assert (found - alone).abs().max() < TOLERANCE * wanted.abs().max()
