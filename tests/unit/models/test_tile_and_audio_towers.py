"""Encoders of the families with tiles and of those with audio against transformers, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mvllm.models.causal_lm import CausalLM
from tests.helpers.multimodal_zoo import MultiModalEntry, save_model
from tests.helpers.overwriting_ops import overwriting_providers
from tests.helpers.paged_driver import load_model, make_context
from tests.helpers.zoo_audio import (
    AUDIO,
    GEMMA4_BINS,
    MEL_BINS,
    QWEN2_AUDIO_POSITIONS,
    VOXTRAL_POSITIONS,
)
from tests.helpers.zoo_tiles import PATCH, TILE, TILES

TOLERANCE = 2e-5
LFM2_GRIDS = [[[4, 2]], [[4, 4], [4, 4], [2, 6]], [[6, 2], [2, 2]]]


def _marked(entries: dict[str, MultiModalEntry]) -> list[Any]:
    """Names of entries; those that are not of the gate are exhaustive."""
    return [pytest.param(name, marks=() if entry.gate else pytest.mark.exhaustive) for name, entry in entries.items()]


def _images(name: str) -> list[dict[str, torch.Tensor]]:
    """The features of three images with 1, 3 and 2 tiles."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if name.startswith("lfm2_vl"):
        return [
            {"pixel_values": draw(len(grids), 16, 3 * PATCH**2), "spatial_shapes": torch.tensor(grids)}
            for grids in LFM2_GRIDS
        ]
    side = 2 * TILE if name == "idefics3-whole-images" else TILE
    tiles = [draw(count, 3, side, side) for count in (1, 3, 2)]
    return [{"pixel_values": each.unsqueeze(0) if "internvl" not in name else each} for each in tiles]


def _image_embeddings(model: Any, image: dict[str, torch.Tensor]) -> torch.Tensor:
    if "spatial_shapes" in image:
        lengths = image["spatial_shapes"].prod(-1, keepdim=True)
        mask = torch.arange(image["pixel_values"].shape[1]) < lengths
        image = {**image, "pixel_attention_mask": mask.int()}
    found = model.get_image_features(**image).pooler_output
    return torch.cat(list(found)) if not isinstance(found, torch.Tensor) else found.flatten(0, -2)


def _encoded(model: CausalLM, modality: str, items: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    assert model.item_encoder is not None
    with torch.inference_mode():
        return model.item_encoder.encode(modality, items)


def _overwriting(folder: Path) -> CausalLM:
    return load_model(folder, make_context(providers=overwriting_providers()))


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("name", _marked(TILES))
def test_images_have_the_embeddings_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_model(TILES[name].config(), tmp_path)
    model, images = load_model(tmp_path), _images(name)
    together = _encoded(_overwriting(tmp_path), "image", images)
    for image, found in zip(images, together, strict=True):
        with torch.inference_mode():
            _close(found, _image_embeddings(reference, image))
        _close(found, *_encoded(model, "image", [image]))


def _spectrograms(name: str) -> list[dict[str, torch.Tensor]]:
    """The features of three sounds: of 41, 100 and 8 frames, or of 1, 2 and 1 windows."""
    generator = torch.Generator().manual_seed(1)
    if name.startswith("gemma4"):
        return [{"input_features": torch.randn(count, GEMMA4_BINS, generator=generator)} for count in (41, 100, 8)]
    if name.startswith("voxtral"):
        return [
            {"input_features": torch.randn(count, MEL_BINS, 2 * VOXTRAL_POSITIONS, generator=generator)}
            for count in (1, 2, 1)
        ]
    frames = 2 * QWEN2_AUDIO_POSITIONS
    return [
        {
            "input_features": torch.randn(1, MEL_BINS, frames, generator=generator),
            "feature_attention_mask": (torch.arange(frames) < length).int().unsqueeze(0),
        }
        for length in (41, 100, 8)
    ]


def _audio_embeddings(model: Any, sound: dict[str, torch.Tensor]) -> torch.Tensor:
    if sound["input_features"].dim() == 2:  # without padding; transformers' gets some
        padded = torch.nn.functional.pad(sound["input_features"], (0, 0, 0, 17))
        mask = (torch.arange(len(padded)) < len(sound["input_features"])).unsqueeze(0)
        found = model.model.get_audio_features(padded.unsqueeze(0), mask)
        return found.pooler_output[found.attention_mask]
    if "feature_attention_mask" not in sound:
        return model.get_audio_features(**sound).pooler_output
    tower = model.model.audio_tower
    positions, rows = tower._get_feat_extract_output_lengths(sound["feature_attention_mask"].sum(-1))
    is_padding = torch.arange(QWEN2_AUDIO_POSITIONS) >= positions
    mask = torch.zeros(QWEN2_AUDIO_POSITIONS).masked_fill(is_padding, -torch.inf).expand(1, 1, 1, -1)
    states = tower(sound["input_features"], attention_mask=mask).last_hidden_state
    return model.model.multi_modal_projector(states)[0, : int(rows)]


@pytest.mark.parametrize("name", _marked(AUDIO))
def test_sounds_have_the_embeddings_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_model(AUDIO[name].config(), tmp_path)
    model, sounds = load_model(tmp_path), _spectrograms(name)
    together = _encoded(_overwriting(tmp_path), "audio", sounds)
    for sound, found in zip(sounds, together, strict=True):
        with torch.inference_mode():
            _close(found, _audio_embeddings(reference, sound))
        _close(found, *_encoded(model, "audio", [sound]))
