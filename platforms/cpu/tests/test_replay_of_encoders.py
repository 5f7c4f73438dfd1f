"""Vision towers whose images have one shape are recorded and replayed, with the bits of calls."""

from __future__ import annotations

import pytest
import torch

from mvllm.config.hf_config import HFConfig
from mvllm.models.item_encoder import FixedShapeTower
from mvllm.models.vision.clip import ClipTower
from mvllm.models.vision.feature_layers import FeatureLayers
from mvllm.models.vision.internvl import InternVLTower
from mvllm_cpu import kernels
from mvllm_cpu.platform import make_platform
from mvllm_cpu.replay import MOST_ENCODER_SHAPES, MOST_PATCHES, Replay
from tests.helpers.paged_driver import make_context

LOADED = kernels.load()
pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no kernels: {LOADED.reason}")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}
PATCHES, ELEMENTS = 9, 3 * 8 * 8


def make_tower(kind: str, dtype: torch.dtype, layers: tuple[int, ...]) -> FixedShapeTower:
    """A tower with random weights and the kernels of the platform."""
    ctx = make_context(dtype=dtype, providers=make_platform().ops())
    vision, features = (
        HFConfig({**SIZES, "model_type": kind}, "config.json"),
        FeatureLayers(layers, True, "config.json"),
    )
    towers = {"clip_vision_model": ClipTower, "siglip_vision_model": ClipTower, "internvl_vision": InternVLTower}
    tower = towers[kind](ctx, "vision_tower", vision, features)
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for parameter in tower.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        for module in tower.modules():
            if hasattr(module, "prepare_weights"):
                module.prepare_weights()
    return tower


def patches(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(count, PATCHES, ELEMENTS, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("clip_vision_model", (-2,)),
        ("clip_vision_model", (0, 2, -1)),
        ("siglip_vision_model", (-1,)),
        ("internvl_vision", (-1,)),
    ],
)
def test_results_of_replays_are_those_of_calls(kind, layers, dtype):
    tower, backend = make_tower(kind, dtype, layers), Replay(LOADED.library)
    with torch.inference_mode():
        compiled = backend.compile_encoder(tower.compute)
        for i in range(4):
            for count in (1, 3):  # by turns, so that both use the arena
                given = patches(count, dtype, i)
                assert torch.equal(compiled(given), tower.compute(given.clone()))
    for recording in compiled._recordings.values():
        assert not recording.refusals and all(recording._programs.values())


def test_numbers_of_items_that_occur_once_and_large_ones_are_not_recorded():
    tower = make_tower("siglip_vision_model", torch.float32, (-1,))
    with torch.inference_mode():
        compiled = Replay(LOADED.library).compile_encoder(tower.compute)
        for _ in range(2):
            compiled(patches(MOST_PATCHES // PATCHES + 1, torch.float32, 0))
        assert not compiled._recordings
        for count in range(1, MOST_ENCODER_SHAPES + 3):
            compiled(patches(count, torch.float32, 0))
        assert [*compiled._recordings] == [*range(3, MOST_ENCODER_SHAPES + 3)]
        assert not any(compiled._recordings.values())
        compiled(patches(3, torch.float32, 0))
        assert [*compiled._recordings][-1] == 3 and compiled._recordings[3] is not None


def test_compiled_towers_are_dropped():
    tower = make_tower("clip_vision_model", torch.float32, (-1,))
    tower.compile_tower(Replay(LOADED.library))
    assert tower._compiled is not None
    tower.compile_tower(None)
    assert tower._compiled is None
