"""Qwen-VL and GLM-4V against transformers, float32: embeddings of images and videos, and angles of three positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from mvllm.errors import ConfigError, ModelError
from mvllm.models.causal_lm import CausalLM
from mvllm.models.vision.grids import Grid, interpolated, window_order
from tests.helpers.multimodal_zoo import edit_config, save_model
from tests.helpers.overwriting_ops import overwriting_providers
from tests.helpers.paged_driver import load_model, make_context, read_config
from tests.helpers.thread_ranks import fake_group
from tests.helpers.zoo_grids import GRIDS

TOLERANCE = 2e-5
OF_IMAGES = [(1, 4, 6), (1, 2, 2), (1, 10, 8)]
OF_VIDEOS = [(3, 4, 6), (1, 6, 2)]
ENTRIES = [
    pytest.param(name, marks=[] if entry.gate else [pytest.mark.exhaustive], id=name) for name, entry in GRIDS.items()
]


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


def assert_equal_embeddings(reference: Any, model: CausalLM) -> None:
    """Fails unless images and videos of different sizes, together and alone, have transformers' embeddings.

    Together with operations that overwrite their arguments, alone with those of core.
    """
    assert model.config.multimodal is not None
    overwriting = load_model(model.config.path, make_context(providers=overwriting_providers()))
    for modality, grids in (("image", OF_IMAGES), ("video", OF_VIDEOS)):
        of_items = items(grids, modality)
        for item, found in zip(of_items, encoded(overwriting, modality, of_items), strict=True):
            wanted = expected(reference, modality, item)
            assert found.shape == wanted.shape and found.shape[1] == model.config.multimodal.embedding_width
            assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
            (alone,) = encoded(model, modality, [item])
            assert (found - alone).abs().max() < TOLERANCE * wanted.abs().max()


def assert_equal_angles(reference: Any, rotary: Any) -> None:
    """Fails unless tokens with three positions have transformers' angles, and those of the table if they are equal."""
    positions = torch.randint(0, 1000, (3, 50), generator=torch.Generator().manual_seed(3))
    cos, sin = reference.model.language_model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions.unsqueeze(1))
    if rotary.interleaved:  # each value twice
        cos, sin = cos[..., 0::2], sin[..., 0::2]
    rows = rotary.angles(positions[0], None, positions.int())
    found = rows.cos_sin[rows.index]
    half = found.shape[1] // 2
    torch.testing.assert_close(found[:, :half], cos[0, :, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[:, half:], sin[0, :, :half], atol=1e-6, rtol=0)

    same = positions[:1].int().expand(3, -1)
    table = rotary.angles(same[0])
    assert torch.equal(rotary.angles(same[0], None, same).cos_sin, table.cos_sin[table.index])


@pytest.mark.parametrize("name", ENTRIES)
def test_embeddings_and_angles_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save_model(GRIDS[name].config(), tmp_path)
    model: Any = load_model(tmp_path)
    assert_equal_embeddings(reference, model)
    assert_equal_angles(reference, model.rotary)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl-tied"])
def test_first_checkpoints_with_flat_configs_and_other_names_are_read(name: str, tmp_path: Path) -> None:
    reference = save_model(GRIDS[name].config(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": rope["rope_theta"], "use_sliding_window": False, "sliding_window": 32768}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(flat))
    prefixes = (("model.language_model.", "model."), ("model.visual.", "visual."))
    tensors = {}
    for tensor_name, tensor in load_file(tmp_path / "model.safetensors").items():
        old, new = next((each for each in prefixes if tensor_name.startswith(each[0])), ("", ""))
        tensors[new + tensor_name.removeprefix(old)] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model: Any = load_model(tmp_path)
    assert_equal_embeddings(reference, model)
    assert_equal_angles(reference, model.rotary)


@pytest.mark.exhaustive
def test_experts_are_read_from_stacks_either_way_around(tmp_path: Path) -> None:
    save_model(GRIDS["qwen3_vl_moe"].config(), tmp_path)
    as_saved = dict(load_model(tmp_path).named_parameters())
    tensors = load_file(tmp_path / "model.safetensors")
    stacks = [name for name in tensors if ".experts." in name]
    assert len(stacks) == 2 * 4 and all(tensors[name].dim() == 3 for name in stacks)
    for name in stacks:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for name, parameter in load_model(tmp_path).named_parameters():
        assert torch.equal(parameter, as_saved[name]), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "is_tied"), [("qwen2_5_vl", True), ("glm4v", True), ("qwen3_vl", False)])
def test_heads_are_tied_by_the_text_config_where_transformers_does(name: str, is_tied: bool, tmp_path: Path) -> None:
    save_model(GRIDS[name].config(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    edit_config(tmp_path, text_config={**config["text_config"], "tie_word_embeddings": True})
    assert bool(read_config(tmp_path).hf_config.get("tie_word_embeddings")) is is_tied
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings is is_tied


def test_layers_with_deepstack_must_be_on_the_first_stage(tmp_path: Path) -> None:
    save_model(GRIDS["qwen3_vl"].config(), tmp_path)
    load_model(tmp_path, make_context(pp=fake_group("pp", 0, 2)))
    with pytest.raises(ConfigError, match=r"puts 1 layers on the first stage, but .* behind the first 2 layers"):
        load_model(tmp_path, make_context(pp=fake_group("pp", 0, 4)))


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_model(GRIDS["qwen3_vl"].config(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    for part, key, value, message in (
        ("vision_config", "deepstack_visual_indexes", [0, 9], "'deepstack_visual_indexes' should be a list"),
        ("vision_config", "out_hidden_size", 48, "out_hidden_size should be the language model's hidden_size 64"),
        ("vision_config", "num_heads", 16, "should be a multiple of four times num_heads 16"),
        ("vision_config", "num_position_embeddings", 17, "'num_position_embeddings' should be a square"),
        ("text_config", "rope_parameters", {"mrope_section": [4, 2, 1]}, r"mrope_section \[4, 2, 1\] .* sum of 8"),
        ("text_config", "rope_parameters", {"mrope_section": [4, 4]}, "'mrope_section' should be a list of three"),
    ):
        edit_config(tmp_path, **{part: {**config[part], key: value}})
        with pytest.raises(ModelError, match=message):
            load_model(tmp_path)
        edit_config(tmp_path, **{part: config[part]})
    edit_config(tmp_path, image_token_id=384)
    with pytest.raises(ModelError, match="'image_token_id' should be a token id below 384"):
        read_config(tmp_path)


def test_windows_are_cut_at_the_edges_of_each_frame() -> None:
    order, starts = window_order([Grid(1, 6, 4), Grid(2, 2, 6)], merge=2, window=2)
    assert order.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert starts == (0, 16, 24, 32, 36, 44, 48)
    assert window_order([Grid(2, 2, 6)], merge=2, window=2)[0].tolist() == [0, 1, 2, 3, 4, 5]  # from its own first one


@pytest.mark.parametrize(("bicubic", "align_corners"), [(False, True), (False, False), (True, False), (True, True)])
def test_positions_are_interpolated_as_torch_does(bicubic: bool, align_corners: bool) -> None:
    table = torch.randn(5, 5, 3, generator=torch.Generator().manual_seed(0))
    found = interpolated(table, [Grid(2, 8, 4)], 1, bicubic=bicubic, align_corners=align_corners)
    wanted = torch.nn.functional.interpolate(
        table.permute(2, 0, 1)[None],
        size=(8, 4),
        mode="bicubic" if bicubic else "bilinear",
        align_corners=align_corners,
    )
    rows = wanted[0].permute(1, 2, 0).reshape(-1, 3)
    torch.testing.assert_close(found, rows.repeat(2, 1), atol=1e-5, rtol=0)


def test_a_scaling_by_length_is_refused_with_three_positions(tmp_path: Path) -> None:
    save_model(GRIDS["qwen2_5_vl"].config(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
    edit_config(tmp_path, text_config={**config["text_config"], "rope_parameters": rope})
    with pytest.raises(ModelError, match="'dynamic' is not supported with mrope_section"):
        load_model(tmp_path)


def test_a_config_without_vision_part_is_a_text_model(tmp_path: Path) -> None:
    save_model(GRIDS["qwen2_5_vl"].config(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).multimodal is None
    assert load_model(tmp_path).item_encoder is None
