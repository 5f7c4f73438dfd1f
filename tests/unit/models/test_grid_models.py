"""Qwen-VL and GLM-4V against transformers, float32: towers, angles, and logits behind images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm.models.causal_lm import CausalLM
from tests.helpers.grid_zoo import GRID_CONFIGS
from tests.helpers.multimodal_zoo import save_model
from tests.helpers.paged_driver import load_model

TOLERANCE = 2e-5
GRIDS = [(1, 4, 6), (1, 2, 2), (1, 10, 8)]
VIDEOS = [(3, 4, 6), (1, 6, 2)]


def items(grids: list[tuple[int, int, int]], modality: str = "image") -> list[dict[str, torch.Tensor]]:
    """Features of items with these grids."""
    generator = torch.Generator().manual_seed(2)
    pixels = "pixel_values_videos" if modality == "video" else "pixel_values"
    return [
        {
            pixels: torch.randn(t * h * w, 3 * 2 * 4 * 4, generator=generator),
            f"{modality}_grid_thw": torch.tensor([[t, h, w]]),
        }
        for t, h, w in grids
    ]


def expected(reference: Any, modality: str, item: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers' rows of one item, with those of DeepStack beside them."""
    pixels, grid = item.values()
    with torch.inference_mode():
        found = getattr(reference.model, f"get_{modality}_features")(pixels, grid, return_dict=True)
    streams = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(stream)) for stream in streams], dim=-1)


def encoded(model: CausalLM, modality: str, of_items: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    assert model.item_encoder is not None
    with torch.inference_mode():
        return model.item_encoder.encode(modality, of_items)


@pytest.mark.parametrize("name", GRID_CONFIGS)
def test_images_and_videos_have_the_embeddings_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_model(GRID_CONFIGS[name](), tmp_path)
    model = load_model(tmp_path)
    for modality, grids in (("image", GRIDS), ("video", VIDEOS)):
        of_items = items(grids, modality)
        for item, found in zip(of_items, encoded(model, modality, of_items), strict=True):
            wanted = expected(reference, modality, item)
            assert found.shape == wanted.shape and found.shape[1] == model.config.multimodal.embedding_width
            assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
            (alone,) = encoded(model, modality, [item])
            assert (found - alone).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("name", GRID_CONFIGS)
def test_angles_of_three_positions_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_model(GRID_CONFIGS[name](), tmp_path)
    rotary = load_model(tmp_path).rotary
    positions = torch.randint(0, 1000, (3, 50), generator=torch.Generator().manual_seed(3))
    cos, sin = reference.model.language_model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions.unsqueeze(1))
    if rotary.interleaved:  # each value twice
        cos, sin = cos[..., 0::2].repeat(1, 1, 2), sin[..., 0::2].repeat(1, 1, 2)
    rows = rotary.angles(positions[0], None, positions.int())
    half = rows.cos_sin.shape[1] // 2
    found = rows.cos_sin[rows.index]
    torch.testing.assert_close(found[:, :half], cos[0, :, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[:, half:], sin[0, :, :half], atol=1e-6, rtol=0)

    same = positions[:1].int().expand(3, -1)
    table = rotary.angles(same[0])
    assert torch.equal(rotary.angles(same[0], None, same).cos_sin, table.cos_sin[table.index])
