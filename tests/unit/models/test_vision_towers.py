"""Encoders of multimodal models against transformers: the embeddings of images, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, PixtralVisionConfig, Qwen2Config, SiglipVisionConfig

from mvllm.models.causal_lm import CausalLM
from tests.helpers.multimodal_zoo import TEXT, save_model
from tests.helpers.paged_driver import load_model

TOLERANCE = 2e-5
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}
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
}
SQUARES = [{"pixel_values": (1, 3, 24, 24)}] * 3
SIZES = [(24, 16), (8, 24), (16, 16)]


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
    return [{"pixel_values": torch.randn(1, 3, 24, 24, generator=generator)} for _ in range(3)]


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
    together = _encoded(model, images)
    for image, found in zip(images, together, strict=True):
        wanted = _expected(reference, image)
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
        (alone,) = _encoded(model, [image])
        assert (found - alone).abs().max() < TOLERANCE * wanted.abs().max()
